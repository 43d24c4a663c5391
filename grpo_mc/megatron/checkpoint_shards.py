"""Which pieces of which global tensors a rank saves and loads: the weights and the optimizer state as sharded tensors.

The weights come from Megatron-Core's `sharded_state_dict`. The optimizer state does not: of the formats that
Megatron-Core 0.16 offers, the one that loads on another layout ("fully_reshardable") first gathers the whole state on
every data-parallel rank, once for the weights and once for each moment. Here each rank's part is described where it
lies instead. The distributed optimizer gives a rank a range of a flattened parameter; such a range is a few boxes of
the parameter (the rest of a row, whole rows, the start of a row), a box is a view of the flat state, and a sharded
tensor may consist of any boxes. Nothing is gathered or copied, every rank writes what it owns, and what is loaded goes
straight into the live tensors. Global keys and shapes do not depend on the layout (one key a layer and expert).

Main weights are saved with the optimizer only where they are not the model's own (bf16 models).

Moments in 8 or 4 bits are codes of blocks of a rank's range: they have a meaning on the same layout alone, and are
saved as they lie, each rank's under keys of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from grpo_mc.megatron.model import PolicyModel

OPTIMIZER_PREFIX = "optimizer.state."
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Box:
    """A box of a tensor whose elements are neighbours in row-major order."""

    offset: tuple[int, ...]
    size: tuple[int, ...]


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Cuts the elements [start, stop) of a flattened tensor into boxes, in order.

    At most 2 * len(shape) - 1 of them. A 3 x 4 tensor's elements [2, 9): (0, 2) 1 x 2, (1, 0) 1 x 4, (2, 0) 1 x 1.
    """
    if start >= stop:
        return
    if len(shape) <= 1:
        yield Box((start,), (stop - start,)) if shape else Box((), ())
        return
    row = math.prod(shape[1:])
    first, last = math.ceil(start / row), stop // row  # the whole rows
    if first > last:  # inside one row
        yield from _in_row(shape, last, start - last * row, stop - last * row)
        return
    if start < first * row:
        yield from _in_row(shape, first - 1, start - (first - 1) * row, row)
    if first < last:
        rest = len(shape) - 1
        yield Box((first, *[0] * rest), (last - first, *shape[1:]))
    if last * row < stop:
        yield from _in_row(shape, last, 0, stop - last * row)


def _in_row(shape: Sequence[int], row: int, start: int, stop: int) -> Iterator[Box]:
    for box in boxes_of_range(shape[1:], start, stop):
        yield Box((row, *box.offset), (1, *box.size))


def distributed_optimizers(optimizer: MegatronOptimizer) -> list[DistributedOptimizer]:
    """The optimizers of dense and expert parameters, behind one facade or not."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def weight_shards(model: PolicyModel) -> list[ShardedTensor]:
    """This rank's parameters and buffers, as they lie; also where another rank holds the same (`replica_id` tells)."""
    return [part for parts in _parts(model) for part in parts]


def optimizer_shards(model: PolicyModel, optimizer: MegatronOptimizer) -> list[ShardedTensor]:
    """This rank's optimizer state, as it lies; the state must exist (see optimizer_state.ensure_state)."""
    parts = {parts[0].data.data_ptr(): parts for parts in _parts(model) if parts[0].data is not None}
    shards: list[ShardedTensor] = []
    for inner in distributed_optimizers(optimizer):
        for parameter, start, states in owned_states(inner):
            for key, state in states.items():
                for part in parts[parameter.data_ptr()]:
                    shards.extend(_cut(part, parameter, start, key, state))
    return shards + list(_code_shards(optimizer))


def _code_shards(optimizer: MegatronOptimizer) -> Iterator[ShardedTensor]:
    """The codes and scales of moments in few bits."""
    rank = dist.get_rank()
    for index, inner in enumerate(distributed_optimizers(optimizer)):
        parameters = [p for group in inner.param_groups for p in group["params"]]
        for place, parameter in enumerate(parameters):
            state = inner.optimizer.state[parameter]
            if state[MOMENTS[0]].is_floating_point():
                continue
            for name, tensor in state.items():
                if name == "param":  # main weights are saved as such
                    continue
                key = f"{OPTIMIZER_PREFIX}codes.{name}.rank_{rank}.{index}.{place}"
                yield ShardedTensor.from_rank_offsets(key, tensor, replica_id=0)


def owned_states(optimizer: DistributedOptimizer) -> Iterator[tuple[Tensor, int, dict[str, Tensor]]]:
    """The parameters of which this rank owns a range: (parameter, first flat element, state [elements] by name)."""
    for buffer_ranges in optimizer.gbuf_ranges:
        for buckets in buffer_ranges.values():
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    states = optimizer._get_main_param_and_optimizer_states(parameter)
                    kept = {key: states[key].detach() for key in MOMENTS if states[key].is_floating_point()}
                    main = states["param"].detach()
                    if main.untyped_storage().data_ptr() != parameter.untyped_storage().data_ptr():
                        kept["param"] = main
                    yield parameter, ranges["param"].start, kept


def _parts(model: PolicyModel) -> list[list[ShardedTensor]]:
    """The sharded tensors of each parameter or buffer, in memory order.

    One, or the two halves of a gated MLP's first matrix, which are sharded one by one.
    """
    metadata = {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "singleton_local_shards": True,
    }
    parts = []
    for value in nested_values(model.sharded_state_dict(metadata=metadata)):
        if isinstance(value, ShardedTensorFactory):
            parts.append(list(nested_values(value.build())))
        elif isinstance(value, ShardedTensor):
            parts.append([value])
        else:
            assert isinstance(value, ShardedObject) and value.data is None, value
    return parts


def _cut(part: ShardedTensor, parameter: Tensor, start: int, key: str, state: Tensor) -> Iterator[ShardedTensor]:
    """The boxes of `part` that a flat state covers, which begins at element `start` of the parameter."""
    assert part.data is not None and part.data.is_contiguous()
    part_start = (part.data.data_ptr() - parameter.data_ptr()) // parameter.element_size()
    low = max(start, part_start)
    high = min(start + state.numel(), part_start + part.data.numel())
    for box in boxes_of_range(part.local_shape, low - part_start, high - part_start):
        numel = math.prod(box.size)
        yield replace(
            part,
            key=f"{OPTIMIZER_PREFIX}{key}.{part.key}",
            data=state[low - start : low - start + numel].view(box.size),
            dtype=state.dtype,
            local_shape=box.size,
            global_offset=tuple(a + b for a, b in zip(part.global_offset, box.offset, strict=True)),
            axis_fragmentations=None,  # no regular grid
            # (pipeline, tensor, data parallel): each data-parallel rank owns a range of its own.
            replica_id=(*part.replica_id[:2], 0),  # type: ignore[index]
        )
        low += numel
