"""Checkpoints of a policy: everything a run needs to go on as if it had not stopped.

On the same layout a restored policy is the saved one to the last bit. It also loads on another layout (tp, pp, ep, dp);
what gradient compression left over then starts from nothing again.
A save is atomic, see checkpoint_files; what is saved, and from where, see checkpoint_shards. All ranks call the
functions here together.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from grpo_mc.megatron import checkpoint_files
from grpo_mc.megatron.checkpoint_files import CheckpointError, LatestCheckpoint
from grpo_mc.megatron.checkpoint_shards import optimizer_shards, weight_shards
from grpo_mc.megatron.checkpoint_storage import read_shards, write_shards
from grpo_mc.megatron.mesh import Mesh
from grpo_mc.megatron.optimizer_state import ensure_state, host_state, restore_host_state, state_kind
from grpo_mc.megatron.train_step import Policy

__all__ = ["CheckpointError", "LatestCheckpoint", "find_latest", "load_checkpoint", "prune", "save_checkpoint"]

_log = logging.getLogger(__name__)
_NOT_IN_WEIGHTS = {"max_positions", "eos_token_ids", "bos_token_id", "pad_token_id", "initializer_range"}
"""Fields of the architecture in which a checkpoint and a policy may differ."""
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
T = TypeVar("T")


def save_checkpoint(policy: Policy, mesh: Mesh, directory: Path, extra: dict[str, Any]) -> None:
    """Saves weights, optimizer state and host state as one checkpoint.

    It is written to `directory` + ".tmp" and renamed when every rank has written its part. A checkpoint of the same
    name is replaced, and so is what a killed save of it left.

    Args:
        directory: checkpoints/step_N, on a file system that all ranks share.
        extra: JSON-able host state (tuples come back as lists, number keys as text); rank 0's is saved.

    Raises:
        ValueError: `extra` is not JSON-able.
        CheckpointError: A rank could not write. Nothing is left of this save; other checkpoints are as they were.
    """
    temporary = checkpoint_files.temporary_path(directory)

    def on_written(shard_files: list[str]) -> None:
        checkpoint_files.write_synced(temporary / checkpoint_files.STATE, state)
        checkpoint_files.write_manifest(temporary, shard_files)
        checkpoint_files.publish(temporary, directory)

    ensure_state(policy.optimizer)
    state = _from_rank_zero(mesh.rank, lambda: _state_file(policy, mesh, extra))
    try:
        write_shards(_shards(policy) + _error_shards(policy), temporary, on_written)
    except BaseException as error:  # Ctrl-C, too, leaves no half of a checkpoint
        if mesh.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        if not isinstance(error, CheckpointException):
            raise
        dist.barrier()  # every rank is here; none goes on before the folder is gone
        clear, cause = _clear_error("save", directory, error)
        raise clear from cause


def load_checkpoint(policy: Policy, mesh: Mesh, directory: Path) -> dict[str, Any]:
    """Restores a policy, in place, from a complete checkpoint of the same model; the layout may differ.

    Betas, epsilon and weight decay of the optimizer stay the configuration's.

    Returns:
        The `extra` it was saved with, on every rank.

    Raises:
        ValueError: The checkpoint is incomplete, or of another model, data type or kind of optimizer state, or has
            moments in few bits and is of another layout.
        CheckpointError: A file could not be read. The policy may be partly loaded.
    """
    state, has_errors = _from_rank_zero(mesh.rank, lambda: _read_state_file(policy, mesh, directory))
    ensure_state(policy.optimizer)
    if policy.compression is not None and not has_errors:
        policy.compression.reset()
    try:
        read_shards(_shards(policy) + (_error_shards(policy) if has_errors else []), directory)
    except CheckpointException as error:
        clear, cause = _clear_error("load", directory, error)
        raise clear from cause
    restore_host_state(policy.optimizer, state["optimizer"])
    extra: dict[str, Any] = state["extra"]
    return extra


def find_latest(root: Path) -> LatestCheckpoint:
    """The newest complete checkpoint of a folder, the same on all ranks; rank 0 looks, and warns of incomplete ones.

    Works without torch.distributed too.
    """

    def look() -> LatestCheckpoint:
        found = checkpoint_files.scan(root)
        for path, reason in found.ignored:
            _log.warning("checkpoint %s is ignored: %s", path, reason)
        return found

    return _from_rank_zero(dist.get_rank() if dist.is_initialized() else 0, look)


def prune(root: Path, keep_last: int, keep: set[int]) -> None:
    """Removes complete checkpoints, except the newest `keep_last` and those of the steps in `keep`.

    Rank 0 removes; on other ranks it does nothing, and no rank waits.

    Raises:
        ValueError: keep_last is not at least 1.
    """
    if not dist.is_initialized() or dist.get_rank() == 0:
        checkpoint_files.prune_folder(root, keep_last, keep)


def _shards(policy: Policy) -> list[Any]:
    return weight_shards(policy.model) + optimizer_shards(policy.model, policy.optimizer)


def _error_shards(policy: Policy) -> list[Any]:
    """What gradient compression left over on this rank."""
    return policy.compression.shards() if policy.compression is not None else []


def _compression(policy: Policy, mesh: Mesh) -> dict[str, Any] | None:
    """What has to agree for _error_shards to be of use to a policy."""
    if policy.compression is None:
        return None
    return {"mesh": mesh.describe(), "buckets": policy.compression.identity()}


def _identity(policy: Policy) -> dict[str, Any]:
    """What has to agree between a checkpoint and the policy that it is loaded into."""
    dtype = str(policy.model.config.params_dtype).removeprefix("torch.")
    fields = dataclasses.asdict(policy.model.architecture).items()
    architecture = {name: value for name, value in fields if name not in _NOT_IN_WEIGHTS}
    identity: dict[str, Any] = json.loads(json.dumps({"dtype": dtype, **architecture}))
    return identity


def _state_file(policy: Policy, mesh: Mesh, extra: dict[str, Any]) -> bytes:
    state = {
        "model": _identity(policy),
        "mesh": mesh.describe(),
        "optimizer": host_state(policy.optimizer),
        "compression": _compression(policy, mesh),
    }
    try:
        return json.dumps({**state, "extra": extra}, indent=1).encode()
    except TypeError as error:
        raise ValueError(f"save checkpoint: extra cannot be written as JSON ({error}); convert it first") from error


def _read_state_file(policy: Policy, mesh: Mesh, directory: Path) -> tuple[dict[str, Any], bool]:
    """The host state, and whether the checkpoint holds what gradient compression left over in this very layout."""
    fault = checkpoint_files.fault_of(directory)
    if fault is not None:
        raise ValueError(f"load checkpoint: {directory} is no complete checkpoint: {fault}; choose another")
    state: dict[str, Any] = json.loads((directory / checkpoint_files.STATE).read_text())
    saved: dict[str, Any] = state["model"]
    ours = _identity(policy)
    for name in sorted(saved.keys() | ours.keys()):
        if saved.get(name) != ours.get(name):
            raise ValueError(
                f"load checkpoint: {directory} was saved with {name} = {saved.get(name)!r} but the model has"
                f" {ours.get(name)!r}; choose a checkpoint of this model, or the model and dtype of the checkpoint"
            )
    _check_states(state, policy, mesh, directory)
    compression = _compression(policy, mesh)
    return state, compression is not None and state.get("compression") == compression


def _check_states(state: dict[str, Any], policy: Policy, mesh: Mesh, directory: Path) -> None:
    """Moments are read as they were saved; in few bits they belong to one layout."""
    saved, ours = state["optimizer"].get("states", "fp32"), state_kind(policy.optimizer)
    if saved != ours:
        raise ValueError(
            f"load checkpoint: {directory} was saved with optimizer.states = '{saved}' but the configuration has"
            f" '{ours}'; set optimizer.kind: fused_adamw and optimizer.states: {saved}"
        )
    if saved != "fp32" and state["mesh"] != mesh.describe():
        raise ValueError(
            f"load checkpoint: {directory} was saved on {state['mesh']}, and this run is on {mesh.describe()}; moments"
            f" in {saved} load on the same layout only: go on with it; optimizer.states: fp32 would load on any"
        )


def _from_rank_zero(rank: int, fn: Callable[[], T]) -> T:
    """Runs fn on rank 0; every rank gets its result, or raises what it raised."""
    box: list[Any] = [None]
    if rank == 0:
        try:
            box = [(fn(), None)]
        except (ValueError, OSError) as error:
            box = [(None, error)]
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(box, 0)
    result, failure = box[0]
    if failure is not None:
        raise failure
    return result  # type: ignore[no-any-return]


def _clear_error(
    operation: str, directory: Path, error: CheckpointException
) -> tuple[BaseException, CheckpointException | None]:
    """What to raise, on every rank, for the failures that torch gathered: the first of them in one line.

    Returns:
        It and its cause: the whole list, or None where the line says it all (the operating system refused, or it was
        Ctrl-C).
    """
    rank, (failure, _) = min(error.failures.items())
    if not isinstance(failure, Exception):
        return failure, None
    reason = failure.strerror if isinstance(failure, OSError) and failure.filename is None else None
    message = f"{operation} checkpoint {directory}: rank {rank}: {reason or failure}"
    if isinstance(failure, OSError) and operation == "load":
        message += "; remove this folder to go on from an earlier checkpoint, or start anew with another run.dir"
    if isinstance(failure, OSError) and failure.errno in _NO_SPACE:
        free = shutil.disk_usage(next(parent for parent in directory.parents if parent.exists())).free / 1e9
        message += (
            f"; {free:.2f} GB are free there. Free space, lower checkpoint.keep_last or move run.dir;"
            " earlier checkpoints are untouched"
        )
    return CheckpointError(message), None if isinstance(failure, OSError) else error
