"""Compressed gradient reduction inside Megatron-Core's DDP, which has no hook for it.

`install` gives every bucket group that spans several ranks a `start_grad_sync` of its own, which sends the buckets
through a compressed reduce-scatter; with overlap_grad_reduce it runs beside the backward pass and finish_grad_sync
waits for it, as for Megatron-Core's own. `uninstall` takes it away again. Megatron-Core's classes are untouched, and so
is every other DDP of the process.

Where a step is thrown away because its gradient is not finite, on all ranks as the optimizer agrees, call `undo`.

Not with tensor parallelism without sequence parallelism: there a norm's gradient is the same on all tensor-parallel
ranks and no collective makes it so. The block that it is quantised in holds other parameters too, which differ between
those ranks, and so would its rounding: the copies of the norm would drift apart.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from grpo_mc.megatron.checkpoint_shards import OPTIMIZER_PREFIX
from grpo_mc.megatron.compressed_collectives import CompressedReduceScatter, Pending, ReduceScatter
from grpo_mc.megatron.wire_format import INT4, INT8

FORMATS = {"int4": INT4, "int8": INT8}
"""By the names of parallel.grad_compression."""
MakeReduceScatter = Callable[[int, Any, Any], ReduceScatter]
"""(entries of a bucket, process group, device) -> what sums it; a two-level one makes its groups beforehand."""


def compressed(name: str) -> MakeReduceScatter:
    """The reduce-scatter of that name, "int4" or "int8"."""
    if name not in FORMATS:
        raise ValueError(f"gradient compression: {name!r} is unknown; it must be one of {', '.join(FORMATS)}")
    return lambda numel, group, device: CompressedReduceScatter(numel, group, FORMATS[name], device)


class GradCompression:
    """The compressed reduction of one DDP, with this rank's error feedback."""

    def __init__(self, ddp: DistributedDataParallel, make: MakeReduceScatter) -> None:
        """See install."""
        self._groups = []
        self._scatters: dict[str, ReduceScatter] = {}
        for group_at, bucket_group in enumerate(ddp.bucket_groups + ddp.expert_parallel_bucket_groups):
            ranks = bucket_group.intra_distributed_optimizer_instance_group
            if ranks.size() == 1:
                continue
            scatters = []
            for bucket_at, bucket in enumerate(bucket_group.buckets):
                scatters.append(make(bucket.grad_data.numel(), ranks, bucket.grad_data.device))
                self._scatters[f"{group_at}.{bucket_at}"] = scatters[-1]
            bucket_group.start_grad_sync = partial(
                _start_grad_sync, bucket_group, scatters, bucket_group.start_grad_sync
            )
            self._groups.append(bucket_group)

    def uninstall(self) -> None:
        """Gives the bucket groups Megatron-Core's own reduction back."""
        for bucket_group in self._groups:
            del bucket_group.start_grad_sync  # the instance's; the class has its own
        self._groups = []

    def undo(self) -> None:
        """Puts the error feedback back as it was before the last step; for one that is thrown away, on every rank."""
        for scatter in self._scatters.values():
            scatter.undo()

    def reset(self) -> None:
        """Forgets what was left over."""
        for scatter in self._scatters.values():
            scatter.reset()

    def state_dict(self) -> dict[str, Any]:
        """This rank's error feedback by bucket."""
        return {name: scatter.state_dict() for name, scatter in self._scatters.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copies what state_dict returned.

        Raises:
            ValueError: It is of other buckets, another layout or another format.
        """
        if state.keys() != self._scatters.keys():
            raise ValueError(
                f"gradient compression: the state has buckets {sorted(state)} but DDP has {sorted(self._scatters)};"
                " reset() instead"
            )
        for name, scatter in self._scatters.items():
            scatter.load_state_dict(state[name])

    def identity(self) -> dict[str, Any]:
        """What the error feedback belongs to, as JSON values: it is of use only to the same rank of the same layout."""
        return _without_tensors(self.state_dict())

    def shards(self) -> list[ShardedTensor]:
        """The error feedback for a checkpoint: tensors of this rank alone, loaded in place."""
        prefix = f"{OPTIMIZER_PREFIX}grad_compression.rank{dist.get_rank()}"
        tensors = _tensors(self.state_dict())
        return [
            ShardedTensor.from_rank_offsets(f"{prefix}.{name}", tensor, replica_id=0)
            for name, tensor in tensors.items()
            if tensor.numel()
        ]


def install(ddp: DistributedDataParallel, make: MakeReduceScatter) -> GradCompression:
    """Compresses the gradient reduction of a DDP from now on; where a group has one rank there is nothing to reduce.

    Args:
        ddp: With the distributed optimizer, in one instance.
        make: How a bucket is summed, e.g. compressed("int4").

    Raises:
        ValueError: a setting of DDP or of the model that this cannot serve.
    """
    settings, model = ddp.ddp_config, ddp.config
    problems = {
        "use_distributed_optimizer is False; it must be True": not settings.use_distributed_optimizer,
        "num_distributed_optimizer_instances is above 1; it must be 1": settings.num_distributed_optimizer_instances
        > 1,
        "reduce_scatter_with_fp32_accumulation is True; leave it out, sums are float32 here anyway": (
            settings.reduce_scatter_with_fp32_accumulation
        ),
        f"tensor_model_parallel_size is {model.tensor_model_parallel_size} without sequence_parallel; turn it on, or"
        " copies of norms drift apart": model.tensor_model_parallel_size > 1 and not model.sequence_parallel,
    }
    for problem, is_there in problems.items():
        if is_there:
            raise ValueError(f"gradient compression: {problem}")
    return GradCompression(ddp, make)


class _Reductions:
    """The reductions of a bucket group that are on their way; Megatron-Core waits for it as for a collective."""

    def __init__(self, pending: list[tuple[Pending, Tensor]], divisor: float) -> None:
        self._pending, self._divisor = pending, divisor

    def wait(self) -> None:
        for pending, out in self._pending:
            pending.wait(out, self._divisor)


def _start_grad_sync(
    bucket_group: Any, scatters: list[ReduceScatter], original: Callable[..., None], force_all_reduce: bool = False
) -> None:
    """_ParamAndGradBucketGroup.start_grad_sync of Megatron-Core 0.16, with other collectives."""
    if force_all_reduce:  # the whole gradient on every rank: no compression for that
        original(force_all_reduce=True)
        return
    if bucket_group.is_first_batch and bucket_group.grad_reduce_handle is not None:
        return
    assert bucket_group.grad_reduce_handle is None
    settings = bucket_group.ddp_config
    if settings.check_for_nan_in_grad or settings.check_for_large_grads:
        bucket_group.check_grads(
            check_for_nan_or_inf=settings.check_for_nan_in_grad, check_for_large=settings.check_for_large_grads
        )
    ranks = bucket_group.intra_distributed_optimizer_instance_group
    pending = []
    for bucket, scatter in zip(bucket_group.buckets, scatters, strict=True):
        if bucket.gradient_scaling_factor != 1.0:
            bucket.grad_data *= bucket.gradient_scaling_factor
        own = bucket.grad_data.view(ranks.size(), -1)[ranks.rank()]
        pending.append((scatter.start(bucket.grad_data), own))
    reductions = _Reductions(pending, float(ranks.size()) if settings.average_in_collective else 1.0)
    if settings.overlap_grad_reduce:
        bucket_group.grad_reduce_handle = reductions
    else:
        reductions.wait()


def _tensors(state: dict[str, Any], prefix: str = "") -> dict[str, Tensor]:
    """The tensors of nested dictionaries, under their paths."""
    found: dict[str, Tensor] = {}
    for key, value in state.items():
        if isinstance(value, dict):
            found |= _tensors(value, f"{prefix}{key}.")
        elif isinstance(value, Tensor):
            found[prefix + key] = value
    return found


def _without_tensors(state: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _without_tensors(value) if isinstance(value, dict) else value
        for key, value in state.items()
        if not isinstance(value, Tensor)
    }
