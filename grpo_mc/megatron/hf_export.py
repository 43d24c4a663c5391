"""Writing a model as a Hugging Face folder: sharded safetensors, index, config.json, generation_config.json.

The architecture alone tells every tensor's name and shape, so the files are laid out before the first tensor comes.
Tensors may then arrive in any order (e.g. from one pipeline stage after the other) and each goes straight to its
place: no more than one tensor is held. The folder is written beside its final name and renamed when it is complete,
so a reader never meets half of it.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_mc.megatron.hf_config import ModelArchitecture
from grpo_mc.megatron.hf_mapping import hf_tensor_shapes
from grpo_mc.megatron.safetensors_file import DTYPE_NAMES, TensorEntry, layout, tensor_bytes

MAX_SHARD_BYTES = 5_000_000_000


def write_hf_folder(
    directory: str | Path,
    arch: ModelArchitecture,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    dtype: torch.dtype,
    tokenizer_files: Sequence[str | Path] = (),
    max_shard_bytes: int = MAX_SHARD_BYTES,
    overwrite: bool = False,
) -> Path:
    """Write a complete model folder; transformers' AutoModelForCausalLM loads it.

    Args:
        directory: folder to create; its parent is created as needed.
        arch: architecture of the model.
        tensors: every tensor of hf_tensor_shapes(arch) once, as (name, tensor), in any order; on any device.
        dtype: dtype to store; values are converted one tensor at a time.
        tokenizer_files: files to copy into the folder.
        max_shard_bytes: a safetensors file takes tensors up to this size (a larger tensor has a file to itself).
        overwrite: replace an existing folder instead of raising.

    Returns:
        The folder's path.

    Raises:
        ValueError: the folder exists, the dtype cannot be stored, a tokenizer file is missing, or a tensor is
            missing, unknown, given twice or of the wrong shape.
        OSError: the disk is full or cannot be written. Whatever the error, nothing is left behind.
    """
    directory = Path(directory)
    if dtype not in DTYPE_NAMES:
        raise ValueError(f"export model: cannot store {dtype}; use one of {', '.join(map(str, DTYPE_NAMES))}")
    missing = [os.fspath(file) for file in tokenizer_files if not Path(file).is_file()]
    if missing:
        raise ValueError(f"export model: tokenizer file {missing[0]} is missing; correct model.tokenizer")
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"export model: {directory} is a file; remove it or choose another folder")
    if directory.exists() and not overwrite and any(directory.iterdir()):
        raise ValueError(f"export model: {directory} exists and is not empty; remove it or choose another folder")
    directory.parent.mkdir(parents=True, exist_ok=True)
    _require_space(directory.parent, arch, dtype)
    partial = Path(tempfile.mkdtemp(prefix=f".{directory.name}.partial-", dir=directory.parent))
    try:
        _write_weights(partial, arch, tensors, dtype, max_shard_bytes)
        _write_configs(partial, arch, dtype)
        for file in tokenizer_files:
            shutil.copyfile(file, partial / Path(file).name)
        _publish(partial, directory)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OSError(
                error.errno, f"export model: the disk of {directory} is full; free some space or choose another folder"
            ) from error
        raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return directory


def _require_space(folder: Path, arch: ModelArchitecture, dtype: torch.dtype) -> None:
    needed = sum(torch.Size(shape).numel() for shape in hf_tensor_shapes(arch).values()) * dtype.itemsize
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(
            errno.ENOSPC,
            f"export model: the weights need {needed / 1e6:.0f} MB but the disk of {folder} has {free / 1e6:.0f} MB "
            "free; free some space or choose another folder",
        )


def plan_shards(arch: ModelArchitecture, dtype: torch.dtype, max_shard_bytes: int) -> dict[str, dict[str, Any]]:
    """Divide the tensors over files, in layer order: file name -> tensor name -> shape."""
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    size = 0
    for name, shape in hf_tensor_shapes(arch).items():
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        if shards[-1] and size + num_bytes > max_shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = shape
        size += num_bytes
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": shard for i, shard in enumerate(shards, start=1)}


def _write_weights(
    folder: Path, arch: ModelArchitecture, tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype, max_bytes: int
) -> None:
    places: dict[str, TensorEntry] = {}
    plan = plan_shards(arch, dtype, max_bytes)
    for file, shapes in plan.items():
        head, entries = layout(shapes, dtype, folder / file)
        (folder / file).write_bytes(head)
        places |= entries
    if len(plan) > 1:
        index = {
            "metadata": {"total_size": sum(entry.num_bytes for entry in places.values())},
            "weight_map": {name: entry.path.name for name, entry in places.items()},
        }
        _write_json(folder / "model.safetensors.index.json", index)
    waiting = dict(places)
    for name, tensor in tensors:
        if name not in waiting:
            what = "was given twice" if name in places else f"is none of a {arch.family} model's tensors"
            raise ValueError(f"export model: tensor '{name}' {what}; pass each of hf_tensor_shapes(arch) once")
        _write_tensor(waiting.pop(name), name, tensor)
    if waiting:
        raise ValueError(
            f"export model: {len(waiting)} of {len(places)} tensors are missing, first '{next(iter(waiting))}'; pass "
            "the tensors of every pipeline stage and expert"
        )
    for file in plan:
        _sync(folder / file)


def _write_tensor(place: TensorEntry, name: str, tensor: Tensor) -> None:
    if tuple(tensor.shape) != place.shape:
        raise ValueError(
            f"export model: tensor '{name}' is {list(tensor.shape)}, needed {list(place.shape)}; join the "
            "tensor-parallel shards first (hf_tensors)"
        )
    stored = tensor.detach().to(device="cpu", dtype=place.dtype).contiguous()
    if stored.numel() == 0:
        return
    buffer = tensor_bytes(stored)
    with place.path.open("r+b", buffering=0) as file:
        done = 0
        while done < len(buffer):
            done += os.pwrite(file.fileno(), buffer[done:], place.begin + done)


def _write_configs(folder: Path, arch: ModelArchitecture, dtype: torch.dtype) -> None:
    config = arch.to_hf_config_dict(str(dtype).removeprefix("torch."))
    _write_json(folder / "config.json", config)
    keys = ("bos_token_id", "eos_token_id", "pad_token_id")
    _write_json(folder / "generation_config.json", {key: config[key] for key in keys if config[key] is not None})


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    _sync(path)


def _sync(path: Path) -> None:
    """Put a file or folder on the disk, so that the rename cannot overtake its content."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _publish(partial: Path, directory: Path) -> None:
    """Give the complete folder its name; a folder already there is moved aside first and removed afterwards."""
    partial.chmod(0o777 & ~_umask())  # mkdtemp made it private
    _sync(partial)
    aside = None
    if directory.exists():
        aside = Path(tempfile.mkdtemp(prefix=f".{directory.name}.old-", dir=directory.parent))
        os.replace(directory, aside)
    os.replace(partial, directory)
    _sync(directory.parent)
    if aside is not None:
        shutil.rmtree(aside, ignore_errors=True)


def _umask() -> int:
    value = os.umask(0)
    os.umask(value)
    return value
