"""Gradient reduction and parameter gathering between processes of one host, through shared memory.

Gloo sends everything through sockets, which costs more than a training step of a small model: 0.8 s to scatter the
gradients of SmolLM2-135M over two ranks and 0.7 s to gather its parameters, against 0.07 and 0.08 s here (2 cores of an
AMD EPYC, float32). The ranks of a group that lie on one host hand their data over in chunks, which stay in the cache.
The chunks are double-buffered, so that each costs one barrier, which also bounds every wait and notices a rank that
died (see host_barrier). A group that spans hosts, or that gets no shared memory, uses gloo.

Sums are taken in the order of the ranks, so they do not depend on which rank adds them up.
"""

from __future__ import annotations

import logging
import mmap
import os
import secrets
from collections.abc import Callable
from functools import partial
from typing import IO, Any

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_mc.megatron.host_barrier import STORES_STAY_IN_ORDER, HostBarrier, cells_bytes

_log = logging.getLogger(__name__)

STAGE_BYTES = 16 << 20
"""Shared memory of a group: half of a last-level cache of 32 MiB, and less than a container's usual 64 MiB."""
_TOKEN_BYTES = 16
_ALIGNMENT = 64

ProcessGroup = dist.ProcessGroup


class Stage:
    """The shared memory of one group, mapped by all its ranks."""

    def __init__(self, group: ProcessGroup, file: IO[bytes], memory: mmap.mmap) -> None:
        """
        Args:
            file, memory: STAGE_BYTES and the barrier's cells, zeros; the same on every rank.
        """
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self._barrier: Callable[[], Any] = partial(dist.barrier, group)
        if STORES_STAY_IN_ORDER:
            timeout_s = _timeout_s(group)
            barrier = HostBarrier(file, memory, STAGE_BYTES, rank=self.rank, ranks=self.ranks, timeout_s=timeout_s)
            self._barrier = barrier.wait
        cells = 2 * self.ranks * (self.ranks - 1)
        self.chunk_bytes = STAGE_BYTES // cells // _ALIGNMENT * _ALIGNMENT
        """Bytes that one rank hands to one other between two barriers."""
        whole = torch.frombuffer(memory, dtype=torch.uint8, count=cells * self.chunk_bytes)
        self._halves = whole.view(2, self.ranks, self.ranks - 1, self.chunk_bytes)
        self._turn = 0

    def reduce_scatter(self, shards: list[Tensor]) -> None:
        """Adds every rank's shards up: shards[rank] of this rank becomes the sum; the others keep their values.

        Args:
            shards: One [n] for each rank, contiguous, in any dtype.
        """
        own = shards[self.rank]
        size = self.chunk_bytes // own.element_size()
        for first in range(0, len(own), size):
            half = self._next_half()
            for other in self._others():
                piece = shards[other][first : first + size]
                _view(half[self.rank, self._cell(self.rank, other)], piece).copy_(piece)
            self._barrier()
            piece = own[first : first + size]
            parts = [
                piece if rank == self.rank else _view(half[rank, self._cell(rank, self.rank)], piece)
                for rank in range(self.ranks)
            ]
            total = torch.add(parts[0], parts[1], out=piece if self.ranks == 2 else None)
            for part in parts[2:]:
                total += part
            if self.ranks > 2:
                piece.copy_(total)

    def all_gather(self, shards: list[Tensor]) -> None:
        """Gives every rank all shards: shards[r] becomes what rank r has there.

        Args:
            shards: One [n] for each rank, contiguous, in any dtype.
        """
        own = shards[self.rank]
        size = (self.ranks - 1) * self.chunk_bytes // own.element_size()
        for first in range(0, len(own), size):
            half = self._next_half()
            piece = own[first : first + size]
            _view(half[self.rank].flatten(), piece).copy_(piece)
            self._barrier()
            for other in self._others():
                piece = shards[other][first : first + size]
                piece.copy_(_view(half[other].flatten(), piece))

    def _next_half(self) -> Tensor:
        """[ranks, ranks - 1, chunk_bytes] uint8 to write next. Its readers are done: they passed the barrier since."""
        self._turn ^= 1
        return self._halves[self._turn]

    def _others(self) -> list[int]:
        return [rank for rank in range(self.ranks) if rank != self.rank]

    def _cell(self, writer: int, reader: int) -> int:
        """Which of the writer's cells the reader's data is in."""
        return (reader - writer - 1) % self.ranks


def _timeout_s(group: ProcessGroup) -> float:
    """The bound that the group was made with."""
    return float(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())


def _view(cell: Tensor, like: Tensor) -> Tensor:
    """The beginning of a cell [bytes] as a tensor of the shape and dtype of `like`."""
    return cell[: like.numel() * like.element_size()].view(like.dtype)


def open_stage(group: ProcessGroup) -> Stage | None:
    """Shared memory for a group; all its ranks call it together.

    The first rank makes an anonymous file in memory, which the others open by way of /proc: nothing is left behind,
    however a rank ends.

    Returns:
        None, on every rank, where any rank cannot map it: they are on several hosts, or there is no room.
    """
    token, makes = secrets.token_bytes(_TOKEN_BYTES), dist.get_rank(group) == 0
    num_bytes = STAGE_BYTES + cells_bytes(dist.get_world_size(group))
    file = _make_file(num_bytes, token) if makes else None
    path = f"/proc/{os.getpid()}/fd/{file.fileno()}" if file is not None else None
    box: list[Any] = [(path, token)]
    dist.broadcast_object_list(box, dist.get_process_group_ranks(group)[0], group=group)
    path, token = box[0]
    if path is not None and not makes:
        file = _open_file(path)
    memory = _map_file(file, num_bytes, token) if file is not None else None
    stage = _make_stage(group, file, memory) if file is not None and memory is not None else None
    everywhere: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everywhere, stage is not None, group=group)
    if all(everywhere):
        return stage
    _log.info("ranks %s share no memory and talk through gloo", dist.get_process_group_ranks(group))
    return None


def _make_stage(group: ProcessGroup, file: IO[bytes], memory: mmap.mmap) -> Stage | None:
    """None where the file cannot be locked."""
    try:
        return Stage(group, file, memory)
    except OSError:
        return None


def _make_file(num_bytes: int, token: bytes) -> IO[bytes] | None:
    """A file of so many zeros and the token, in memory; None where there is no room."""
    try:
        file = open(os.memfd_create("grpo_mc_stage"), "r+b", buffering=0)  # noqa: SIM115 - the barrier keeps it
        os.posix_fallocate(file.fileno(), 0, num_bytes + len(token))  # a write to a page that is not there kills
        os.pwrite(file.fileno(), token, num_bytes)
    except OSError:
        return None
    return file


def _open_file(path: str) -> IO[bytes] | None:
    """Another process's file; None where there is none: the path is of another host."""
    try:
        return open(path, "r+b", buffering=0)  # noqa: SIM115 - the barrier's locks live as long as it is open
    except OSError:
        return None


def _map_file(file: IO[bytes], num_bytes: int, token: bytes) -> mmap.mmap | None:
    """The file's memory; None for a file that does not end in the token: it is another one."""
    try:
        memory = mmap.mmap(file.fileno(), num_bytes + len(token))
    except (OSError, ValueError):  # ValueError: the file is shorter
        return None
    return memory if memory[num_bytes:] == token else None


_stages: dict[ProcessGroup, Stage | None] = {}


def close_stages() -> None:
    """Forgets all shared memory; for when the process groups end."""
    _stages.clear()


def _stage_of(group: ProcessGroup) -> Stage | None:
    if group not in _stages:
        _stages[group] = open_stage(group)
    return _stages[group]


def reduce_scatter(
    output: Tensor, source: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Any:
    """torch.distributed.reduce_scatter_tensor; in place (output is this rank's part of source) not by gloo if it can
    be. The other parts of source then keep their values."""
    shards = _shards_in_place(source, output, group)
    if shards is not None and not async_op and op == dist.ReduceOp.SUM:
        if len(shards) == 1:
            return None  # gloo would copy the whole buffer onto itself
        stage = _stage_of(group)
        if stage is not None:
            return stage.reduce_scatter(shards)
    return dist.reduce_scatter_tensor(output, source, op=op, group=group, async_op=async_op)


def all_gather(output: Tensor, source: Tensor, group: Any = None, async_op: bool = False) -> Any:
    """torch.distributed.all_gather_into_tensor; in place (source is this rank's part of output) not by gloo if it can
    be."""
    shards = _shards_in_place(output, source, group)
    if shards is not None and not async_op:
        if len(shards) == 1:
            return None
        stage = _stage_of(group)
        if stage is not None:
            return stage.all_gather(shards)
    return dist.all_gather_into_tensor(output, source, group=group, async_op=async_op)


def _shards_in_place(whole: Tensor, own: Tensor, group: Any) -> list[Tensor] | None:
    """The ranks' equal parts of whole [ranks * n]; None when `own` [n] is not this rank's part itself."""
    if whole.dim() != 1 or not whole.is_contiguous() or len(whole) % dist.get_world_size(group):
        return None
    shards = list(whole.view(dist.get_world_size(group), -1))
    return shards if own.data_ptr() == shards[dist.get_rank(group)].data_ptr() else None
