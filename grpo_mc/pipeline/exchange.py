"""How ranks tell each other about host-side records: whole groups, arrays, flags.

The records of a step are small beside the model (token ids and log-probs). Every rank gets all of them, and then
computes the same advantages, filters, denominators and micro-batch plans by itself, without further messages.
"""

from __future__ import annotations

import time
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from grpo_mc.data.records import Group
from grpo_mc.megatron.mesh import Mesh

Value = TypeVar("Value")
MEETING_S = 30.0
"""Longest wait of ranks that failed for the others."""
_FAILED = "grpo_mc/failed_ranks"


def gather_from_leaders(value: Value, mesh: Mesh) -> list[Value]:
    """What each model group's leader holds, by rank, on every rank. The values of other ranks are dropped."""
    if mesh.world_size == 1:
        return [value]
    boxes: list[Value | None] = [None] * mesh.world_size
    dist.all_gather_object(boxes, value if mesh.is_model_leader else None)
    return [box for box in boxes if box is not None]


def gather_groups(groups: list[Group], mesh: Mesh) -> list[Group]:
    """The groups of all data-parallel ranks, by group id."""
    gathered = gather_from_leaders(groups, mesh)
    return sorted((group for part in gathered for group in part), key=lambda group: group.group_id)


def any_rank(flag: bool, mesh: Mesh) -> bool:
    """Whether the flag is set on any rank; the same answer everywhere."""
    if mesh.world_size == 1:
        return flag
    box = torch.tensor([int(flag)], device=mesh.device)
    dist.all_reduce(box, op=dist.ReduceOp.MAX)
    return bool(box.item())


def broadcast_from_first(value: Value, mesh: Mesh) -> Value:
    """Rank 0's value, on every rank."""
    if mesh.world_size == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, 0)
    return box[0]


def all_ranks_failed(mesh: Mesh, timeout_s: float = MEETING_S) -> bool:
    """Whether every rank calls this within timeout_s: then none is inside a collective, and they can start another.

    For ranks whose step failed, once in the life of the process group. They count themselves in the store, not by a
    collective: a rank that failed alone must not be taken for a part of the collective that the others wait in.
    """
    if mesh.world_size == 1:
        return True
    store, deadline = _get_default_store(), time.monotonic() + timeout_s
    try:
        arrived = store.add(_FAILED, 1)
        while arrived < mesh.world_size:
            if time.monotonic() > deadline:
                if store.add(_FAILED, -1) + 1 < mesh.world_size:
                    return False
                arrived = store.add(_FAILED, 1)  # the last one came this moment and may have seen the full count
                continue
            time.sleep(0.05)
            arrived = store.add(_FAILED, 0)
    except RuntimeError:  # the process that holds the store is gone
        return False
    return True
