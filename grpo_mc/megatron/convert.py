"""Models in and out: from what `model.path` names, or from a training checkpoint, to a Hugging Face folder.

A folder appears complete or not at all (hf_export), with the tokenizer's files beside the weights, so that transformers
and this package load it by its path alone. Weights keep every bit where the stored type stays the same.

The architecture and the tokenizer of a training checkpoint come from its run's config.yaml. Its weights are read, not
its optimizer state, in memory for one copy of the model.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from grpo_mc.config import load_config
from grpo_mc.data.strict_json import parse_json
from grpo_mc.data.tokenizer import Tokenizer, check_fits, load_tokenizer
from grpo_mc.megatron.checkpoint import CheckpointError, find_latest
from grpo_mc.megatron.checkpoint_files import STATE, fault_of, step_of
from grpo_mc.megatron.checkpoint_shards import weight_shards
from grpo_mc.megatron.checkpoint_storage import read_shards
from grpo_mc.megatron.hf_checkpoint import locate_folder, open_checkpoint
from grpo_mc.megatron.hf_config import ModelArchitecture, read_architecture
from grpo_mc.megatron.hf_export import write_hf_folder
from grpo_mc.megatron.mesh import Mesh, build_mesh, destroy_mesh
from grpo_mc.megatron.model import DTYPES, PolicyModel, build_model, policy_config
from grpo_mc.megatron.weights import export_weights

_CONFIG, _CHECKPOINTS = "config.yaml", "checkpoints"
"""Names inside a run directory."""


def import_model(source: str | Path, destination: str | Path, *, dtype: str = "fp32") -> Path:
    """Writes a model as a Hugging Face folder; nothing is trained or sharded, so it needs no process group.

    Args:
        source: a safetensors folder with tokenizer.json, a .gguf file (dequantised), or "package:NAME".
        destination: folder to create; it may exist if it is empty.
        dtype: "fp32" or "bf16", of the stored weights.

    Returns:
        The folder.

    Raises:
        ValueError: the source is missing, damaged or not supported, its tokenizer does not fit its vocabulary, or the
            destination exists.
        OSError: the disk is full or cannot be written; nothing is left behind.
    """
    checkpoint = open_checkpoint(source)
    tokenizer = load_tokenizer(source)
    check_fits(tokenizer, checkpoint.architecture.vocab_size)
    tensors = ((name, checkpoint.tensor(name)) for name in checkpoint.names())
    with _saved(tokenizer) as files:
        return write_hf_folder(
            destination, checkpoint.architecture, tensors, dtype=_stored_dtype(dtype), tokenizer_files=files
        )


def save_hf(
    model: PolicyModel, mesh: Mesh, directory: str | Path, tokenizer: Tokenizer, dtype: str = "fp32", *,
    overwrite: bool = False,
) -> Path:  # fmt: skip
    """Writes a sharded model as a Hugging Face folder. Every rank calls it; rank 0 writes.

    One tensor (one expert set, with expert parallelism) is in rank 0's memory at a time.

    Args:
        directory: folder to create, as rank 0 sees it.
        dtype: "fp32" or "bf16", of the stored weights.
        overwrite: replace an existing folder instead of raising.

    Returns:
        The folder.

    Raises:
        ValueError, OSError: rank 0 could not write (see write_hf_folder); the same error on every rank, so that none
            waits for another.
    """
    tensors = export_weights(model, mesh)
    failure: ValueError | OSError | None = None
    if mesh.rank == 0:
        try:
            with _saved(tokenizer) as files:
                write_hf_folder(
                    directory, model.architecture, tensors, dtype=_stored_dtype(dtype), tokenizer_files=files,
                    overwrite=overwrite,
                )  # fmt: skip
        except (ValueError, OSError) as error:
            failure = error
    for _ in tensors:  # on the other ranks all of them; on rank 0 what an error left, which the others still send
        pass
    box = [failure]
    if mesh.world_size > 1:
        dist.broadcast_object_list(box, 0, device=mesh.device)
    if box[0] is not None:
        raise box[0]
    return Path(directory)


def export_model(checkpoint: str | Path, destination: str | Path, *, dtype: str = "fp32") -> Path:
    """Writes the weights of a training checkpoint as a Hugging Face folder, in this process alone.

    Args:
        checkpoint: RUN_DIR/checkpoints/step_N, or RUN_DIR for the newest complete checkpoint of the run. It may have
            been saved on any layout.
        destination: folder to create; it may exist if it is empty.
        dtype: "fp32" or "bf16", of the stored weights.

    Returns:
        The folder.

    Raises:
        ValueError: there is no complete checkpoint; the run's config.yaml, its model's config.json or its tokenizer is
            missing or of another model; the destination exists; or this process is one of several that hold a model.
        CheckpointError: a file of the checkpoint could not be read.
        OSError: the disk is full or cannot be written; nothing is left behind.
    """
    folder = _find_checkpoint(Path(checkpoint).resolve())
    config = load_config(_run_config(folder), []).model
    architecture = read_architecture(locate_folder(config.path, config.cache_dir))
    saved_dtype = _saved_dtype(folder, architecture)
    tokenizer = load_tokenizer(config.tokenizer or config.path, config.cache_dir)
    with _mesh_of_one() as mesh:
        model_config = policy_config(architecture, mesh, dtype=saved_dtype)
        model_config.perform_initialization = False  # the checkpoint has every parameter
        model = build_model(architecture, mesh, model_config)
        load_model_weights(model, folder)
        return save_hf(model, mesh, destination, tokenizer, dtype)


def load_model_weights(model: PolicyModel, directory: str | Path) -> None:
    """Fills this rank's parameters from a complete checkpoint of the same model and dtype; the layout may differ.

    Every rank calls it. Optimizer state is neither needed nor read.

    Raises:
        CheckpointError: a file could not be read, or does not hold these parameters. The model may be partly loaded.
    """
    try:
        read_shards(weight_shards(model), Path(directory))
    except CheckpointException as error:
        rank, (failure, _) = min(error.failures.items())
        raise CheckpointError(
            f"load weights from {directory}: rank {rank}: {failure}; choose another checkpoint"
        ) from error


def _find_checkpoint(path: Path) -> Path:
    """The checkpoint folder that a path given by the user means."""
    if step_of(path) is not None and path.is_dir():
        fault = fault_of(path)
        if fault is not None:
            raise ValueError(f"export model: {path} is no complete checkpoint: {fault}; choose another")
        return path
    root = path if path.name == _CHECKPOINTS else path / _CHECKPOINTS
    if not root.is_dir():
        what = f"has no {_CHECKPOINTS} folder" if path.is_dir() else "does not exist"
        raise ValueError(f"export model: {path} {what}; give a run directory or its {_CHECKPOINTS}/step_N")
    latest = find_latest(root)
    if latest.path is None:
        ignored = "".join(f"; {folder.name} is not complete: {reason}" for folder, reason in latest.ignored)
        raise ValueError(f"export model: {root} holds no complete checkpoint{ignored}; let the run save one first")
    return latest.path


def _saved_dtype(folder: Path, architecture: ModelArchitecture) -> str:
    """The type ("fp32" or "bf16") of a checkpoint's parameters, once it is known to be of this architecture."""
    saved: dict[str, Any] = parse_json((folder / STATE).read_text(encoding="utf-8"))["model"]
    ours: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(architecture)))
    for name in ours:
        if saved.get(name, ours[name]) != ours[name]:  # it holds no token ids and suchlike, which may differ
            raise ValueError(
                f"export model: {folder} was saved with {name} = {saved[name]!r} but the model of its run's {_CONFIG} "
                f"has {ours[name]!r}; restore the model folder that the run started from"
            )
    return next(name for name, dtype in DTYPES.items() if str(dtype) == f"torch.{saved['dtype']}")


def _run_config(folder: Path) -> Path:
    path = folder.parent.parent / _CONFIG
    if not path.is_file():
        raise ValueError(
            f"export model: {path} is missing, which names the model and tokenizer of {folder}; give a checkpoint in "
            f"its place in a run directory (RUN_DIR/{_CHECKPOINTS}/step_N)"
        )
    return path


@contextmanager
def _mesh_of_one() -> Iterator[Mesh]:
    """A mesh for the whole model in this process, ended with the block unless it was there before."""
    was_there = dist.is_initialized()
    mesh = build_mesh()
    try:
        sizes = [dist.get_world_size(group) for group in (mesh.model_group, mesh.ep_group)]
        if max(sizes) > 1:
            raise ValueError(
                f"export model: this process shares a model with {max(sizes) - 1} others; export from a process of its "
                "own, or call save_hf on all of them"
            )
        yield mesh
    finally:
        if not was_there:
            destroy_mesh()


def _stored_dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise ValueError(f"export model: dtype is '{name}'; use one of {', '.join(DTYPES)}")
    return DTYPES[name]


@contextmanager
def _saved(tokenizer: Tokenizer) -> Iterator[list[Path]]:
    """The tokenizer's files, as long as the with block runs."""
    with tempfile.TemporaryDirectory(prefix="grpo_mc.") as folder:
        tokenizer.save(Path(folder))
        yield sorted(Path(folder).iterdir())
