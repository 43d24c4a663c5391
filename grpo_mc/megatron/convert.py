"""Models in and out: from what `model.path` names, or from a training checkpoint, to a Hugging Face folder.

A folder appears complete or not at all (hf_export), with the tokenizer's files beside the weights, so that transformers
and this package load it by its path alone. Weights keep every bit where the stored type stays the same.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from grpo_mc.data.tokenizer import Tokenizer, check_fits, load_tokenizer
from grpo_mc.megatron.hf_checkpoint import open_checkpoint
from grpo_mc.megatron.hf_export import write_hf_folder
from grpo_mc.megatron.mesh import Mesh
from grpo_mc.megatron.model import DTYPES, PolicyModel
from grpo_mc.megatron.weights import export_weights


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
