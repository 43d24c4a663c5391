"""Reduce-scatter between ranks with few bits on the wire, for gradients over slow links.

    message to rank r = quantise(part r + what earlier messages to r left over)
    own part          = (sum over the ranks, in their order, of what each sent; the own contribution exact) / divisor

Every rank's part travels once, quantised by its sender and summed in float32 by its owner, so that no sum is rounded
to a few bits on the way. Codes and scales of a part are one message, all messages one all-to-all. What rounding leaves
over stays with the sender as 8-bit error feedback, one byte an entry, and goes into the next message: over many steps
nothing is lost. The own part is not quantised: it never travels. The sum is taken after the last message is in, in the
order of the ranks, whatever arrived first.

A training step that is thrown away (its gradient holds a NaN or an infinity) must not change what is left over:
`undo` puts that back. Waits are bounded by the timeout of the process group.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_mc.megatron.wire_format import WireFormat
from grpo_mc.ops import Int4Error

CHUNK_ENTRIES = 1 << 18
"""Entries that are summed at once over all ranks: 1 MiB of float32, which stays in the cache."""


def part_bounds(numel: int, ranks: int) -> list[tuple[int, int]]:
    """(first, last) entry of each rank's part: ceil(numel / ranks) entries; the last ones may be shorter or empty."""
    size = -(-numel // ranks)
    return [(min(rank * size, numel), min((rank + 1) * size, numel)) for rank in range(ranks)]


class PendingSum:
    """A reduce-scatter on its way."""

    def __init__(self, owner: CompressedReduceScatter, work: Any, own: Tensor, sent: Tensor, received: Tensor) -> None:
        self._owner, self._work, self._own, self._sent, self._received = owner, work, own, sent, received

    def wait(self, out: Tensor | None = None, divisor: float = 1.0) -> Tensor:
        """The sum; see CompressedReduceScatter.reduce_scatter."""
        if self._work is not None:
            self._work.wait()
        return self._owner._sum(self._own, self._received, out, divisor)


class CompressedReduceScatter:
    """Sums tensors of one size over the ranks of a group, which call together; holds this rank's error feedback."""

    def __init__(self, numel: int, group: Any, wire: WireFormat | None = None, device: Any = "cpu") -> None:
        """
        Args:
            numel: Entries of the whole tensor, the same on every rank; any number.
            group: The process group.
            wire: What travels.
        """
        self.numel, self.group, self.wire = numel, group, wire or WireFormat()
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.bounds = part_bounds(numel, self.ranks)
        self._sizes = [last - first for first, last in self.bounds]
        self._own_size = self._sizes[self.rank]
        self._others = [rank for rank in range(self.ranks) if rank != self.rank]
        blocks = sum(self.wire.num_blocks(self._sizes[rank]) for rank in self._others)
        self._error = Int4Error(
            torch.zeros(blocks, self.wire.block, dtype=torch.int8, device=device), torch.zeros(blocks, device=device)
        )

    def reduce_scatter(self, whole: Tensor, out: Tensor | None = None, divisor: float = 1.0) -> Tensor:
        return self.start(whole).wait(out, divisor)

    def start(self, whole: Tensor) -> PendingSum:
        whole = whole.detach().flatten()
        sizes = [0 if rank == self.rank else self.wire.num_bytes(size) for rank, size in enumerate(self._sizes)]
        sent = torch.empty(sum(sizes), dtype=torch.uint8, device=whole.device)
        block = byte = 0
        for rank in self._others:
            first, last = self.bounds[rank]
            blocks = self.wire.num_blocks(last - first)
            error = Int4Error(*(part[block : block + blocks] for part in self._error))
            self.wire.encode(whole[first:last], error, sent[byte : byte + sizes[rank]])
            block, byte = block + blocks, byte + sizes[rank]
        own_bytes = self.wire.num_bytes(self._own_size)
        arriving = [0 if rank == self.rank else own_bytes for rank in range(self.ranks)]
        received = torch.empty(sum(arriving), dtype=torch.uint8, device=whole.device)
        work = dist.all_to_all_single(received, sent, arriving, sizes, group=self.group, async_op=True)
        first, last = self.bounds[self.rank]
        return PendingSum(self, work, whole[first:last], sent, received)

    def _sum(self, own: Tensor, received: Tensor, out: Tensor | None, divisor: float) -> Tensor:
        messages = list(received.view(self.ranks - 1, -1))
        parts = [self.wire.decode(message, self._own_size) for message in messages]
        out = torch.empty(self._own_size, device=own.device) if out is None else out
        blocks = CHUNK_ENTRIES // self.wire.block
        for first in range(0, self._own_size, CHUNK_ENTRIES):
            piece = own[first : first + CHUNK_ENTRIES]
            total = torch.zeros(len(piece), device=own.device)
            at = first // self.wire.block
            for rank in range(self.ranks):
                if rank == self.rank:
                    total += piece
                else:
                    codes, scale = parts[rank - (rank > self.rank)]
                    self.wire.add(codes[at : at + blocks], scale[at : at + blocks], total)
            if divisor != 1.0:
                total /= divisor
            out[first : first + CHUNK_ENTRIES] = total
        return out
