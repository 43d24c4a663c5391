"""Reduce-scatter of gradients between ranks with few bits on the wire; of weights see compressed_all_gather.

    message to rank r = quantise(part r + what earlier messages to r left over)
    own part          = (sum over the ranks, in their order, of what each sent; the own contribution exact) / divisor

Every part travels once, quantised by its sender, and is summed in float32 by its owner, so that no sum is rounded to a
few bits on the way. Codes and scales of a part are one message, all messages one all-to-all. What rounding leaves over
stays with the sender as 8-bit error feedback and goes into the next message: over many steps nothing is lost. The own
contribution is not quantised: it never travels. The sum is taken when the last message is in, in the order of the
ranks, whatever arrived first; so it is the same bits every time. With one rank nothing is quantised.

`HierarchicalReduceScatter` does that twice: 8 bits inside a node, then 4 bits between the nodes.

Every wait is bounded by the timeout of the process group. A gradient with a NaN or an infinity gives NaN in its blocks,
never a wrong number. The step is then thrown away, on every rank, and `undo` puts back what was left over before it;
`finite_everywhere` is the ranks' agreement for callers whose optimizer has none. Methods: ZeRO++ (arXiv 2306.10209),
LoCo (arXiv 2407.04480), SDP4Bit (arXiv 2410.15526).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_mc.megatron.wire_format import INT4, INT8, WireFormat
from grpo_mc.ops import Int4Error

_CHUNK_ENTRIES = 1 << 18
"""Entries that are summed over all ranks at once: 1 MiB of float32, which stays in the cache; a multiple of a block."""


def part_bounds(numel: int, ranks: int) -> list[tuple[int, int]]:
    """(first, last) entry of each rank's part: ceil(numel / ranks) entries; the last parts may be shorter or empty."""
    size = -(-numel // ranks)
    return [(min(rank * size, numel), min((rank + 1) * size, numel)) for rank in range(ranks)]


def finite_everywhere(tensors: Sequence[Tensor], group: Any) -> bool:
    """Whether no rank's tensors hold a NaN or an infinity: the same answer on every rank of the group.

    A NaN in a part is seen by the part's owner only. All ranks call together; the wait is bounded by the group's
    timeout.
    """
    finite = torch.stack([tensor.isfinite().all() for tensor in tensors]).all() if tensors else torch.tensor(True)
    flag = finite.to(torch.int32)
    dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=group)
    return bool(flag)


class Pending(Protocol):
    """A reduce-scatter on its way."""

    def wait(self, out: Tensor | None = None, divisor: float = 1.0) -> Tensor:
        """The sum, when it is there; arguments as of ReduceScatter.reduce_scatter."""
        ...


class ReduceScatter(Protocol):
    """A compressed reduce-scatter of tensors of one size, with this rank's error feedback. All ranks call together."""

    def start(self, whole: Tensor) -> Pending:
        """Quantises and sends; the tensor must keep its values until the result has been waited for."""
        ...

    def undo(self) -> None:
        """Puts the error feedback back as it was before the last call; for a step that is thrown away."""
        ...

    def reset(self) -> None:
        """Forgets what was left over."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """This rank's error feedback, the tensors themselves, and what it belongs to."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copies what state_dict returned; ValueError where it is of another size, group or format."""
        ...


class CompressedReduceScatter:
    """Sums tensors of one size over a group; 2 bytes of memory an entry of the other ranks' parts."""

    def __init__(self, numel: int, group: Any, wire: WireFormat = INT4, device: Any = "cpu") -> None:
        """
        Args:
            numel: Entries of the whole tensor, the same on every rank; any number.
            group: The process group.
            wire: What travels.
        """
        self.numel, self.group, self.wire = numel, group, wire
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.bounds = part_bounds(numel, self.ranks)
        """(first, last) entry of each rank's part."""
        self._others = [rank for rank in range(self.ranks) if rank != self.rank]
        self._error, self._before = (self._zeros(device) for _ in range(2))
        self._can_undo = False

    def reduce_scatter(self, whole: Tensor, out: Tensor | None = None, divisor: float = 1.0) -> Tensor:
        """The sum of every rank's tensor, of which this rank gets its part.

        Args:
            whole: numel entries, float32, bfloat16 or float16.
            out: Where the part goes, in any float type; it may be the part of `whole` itself. None = a new float32.
            divisor: Divides the sum once, in float32: the number of ranks gives the mean.

        Returns:
            The part: entries bounds[rank] of the sum.

        Raises:
            ValueError: whole or out of another size.
            RuntimeError: A rank did not come within the group's timeout.
        """
        return self.start(whole).wait(out, divisor)

    def start(self, whole: Tensor) -> Pending:
        """See ReduceScatter."""
        if whole.numel() != self.numel:
            raise ValueError(f"reduce_scatter: whole has {whole.numel()} entries; it must have {self.numel}")
        whole = whole.detach().flatten()
        first, last = self.bounds[self.rank]
        if self.ranks == 1:
            return _PendingSum(self, None, whole, (whole.new_empty(0, dtype=torch.uint8),))
        for kept, now in zip(self._before, self._error, strict=True):
            kept.copy_(now)
        self._can_undo = True
        sent_bytes = [self._message_bytes(rank) if rank != self.rank else 0 for rank in range(self.ranks)]
        sent = torch.empty(sum(sent_bytes), dtype=torch.uint8, device=whole.device)
        block = byte = 0
        for rank in self._others:
            begin, end = self.bounds[rank]
            blocks = self.wire.num_blocks(end - begin)
            error = Int4Error(*(part[block : block + blocks] for part in self._error))
            self.wire.encode(whole[begin:end], error, sent[byte : byte + sent_bytes[rank]])
            block, byte = block + blocks, byte + sent_bytes[rank]
        own_bytes = self._message_bytes(self.rank)
        arriving = [own_bytes if rank != self.rank else 0 for rank in range(self.ranks)]
        received = torch.empty(sum(arriving), dtype=torch.uint8, device=whole.device)
        work = dist.all_to_all_single(received, sent, arriving, sent_bytes, group=self.group, async_op=True)
        return _PendingSum(self, work, whole[first:last], (received, sent))

    def undo(self) -> None:
        """See ReduceScatter; without a call since the last undo, reset or load it does nothing."""
        if self._can_undo:
            for now, kept in zip(self._error, self._before, strict=True):
                now.copy_(kept)
        self._can_undo = False

    def reset(self) -> None:
        """See ReduceScatter."""
        for tensor in self._error:
            tensor.zero_()
        self._can_undo = False

    def state_dict(self) -> dict[str, Any]:
        """See ReduceScatter."""
        return {"identity": self._identity(), "error_codes": self._error.codes, "error_scale": self._error.scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See ReduceScatter."""
        if state["identity"] != self._identity():
            raise ValueError(
                f"reduce_scatter: the state is of {state['identity']} but this is {self._identity()}; reset() instead"
            )
        self._error.codes.copy_(state["error_codes"])
        self._error.scale.copy_(state["error_scale"])
        self._can_undo = False

    def sum_parts(self, own: Tensor, received: Tensor, out: Tensor | None, divisor: float) -> Tensor:
        """The sum over the ranks, in their order, of the own part and of the messages that came for it."""
        if out is not None and out.numel() != len(own):
            raise ValueError(f"reduce_scatter: out has {out.numel()} entries; rank {self.rank} owns {len(own)}")
        out = torch.empty(len(own), device=own.device) if out is None else out
        flat = out.view(-1)
        size = self._message_bytes(self.rank)
        columns = {rank: self.wire.split(received[at * size : (at + 1) * size]) for at, rank in enumerate(self._others)}
        blocks = _CHUNK_ENTRIES // self.wire.block
        for first in range(0, len(own), _CHUNK_ENTRIES):
            piece = own[first : first + _CHUNK_ENTRIES]
            at = slice(first // self.wire.block, first // self.wire.block + blocks)
            total = torch.zeros(len(piece), device=own.device)
            for rank in range(self.ranks):
                if rank == self.rank:
                    total += piece
                else:
                    codes, scale = columns[rank]
                    self.wire.add(codes[at], scale[at], total)
            flat[first : first + _CHUNK_ENTRIES] = total if divisor == 1.0 else total / divisor
        return out

    def _message_bytes(self, rank: int) -> int:
        first, last = self.bounds[rank]
        return self.wire.num_bytes(last - first)

    def _zeros(self, device: Any) -> Int4Error:
        blocks = sum(self.wire.num_blocks(last - first) for first, last in self.bounds)
        blocks -= self.wire.num_blocks(self.bounds[self.rank][1] - self.bounds[self.rank][0])
        codes = torch.zeros(blocks, self.wire.block, dtype=torch.int8, device=device)
        return Int4Error(codes, torch.zeros(blocks, device=device))

    def _identity(self) -> dict[str, Any]:
        wire = {"bits": self.wire.bits, "block": self.wire.block, "hadamard": self.wire.hadamard}
        return {"numel": self.numel, "rank": self.rank, "ranks": self.ranks, **wire}


class _PendingSum:
    """Keeps the buffers, what arrives and what was sent, alive until the messages are in."""

    def __init__(self, scatter: CompressedReduceScatter, work: Any, own: Tensor, buffers: tuple[Tensor, ...]) -> None:
        self._scatter, self._work, self._own, self._buffers = scatter, work, own, buffers

    def wait(self, out: Tensor | None = None, divisor: float = 1.0) -> Tensor:
        if self._work is not None:
            self._work.wait()
        return self._scatter.sum_parts(self._own, self._buffers[0], out, divisor)


class HierarchicalReduceScatter:
    """Sums inside each node with 8 bits, then the nodes' sums between nodes with 4: 1 / node size of the bytes there.

    Parts are numbered node by node: rank i of a node of L ranks, the j-th node, owns part j * L + i. The sum is taken
    in the order of the ranks inside each node, then in the order of the nodes.
    """

    def __init__(
        self, numel: int, node_group: Any, across_group: Any, *, node_wire: WireFormat = INT8,
        across_wire: WireFormat = INT4, device: Any = "cpu",
    ) -> None:  # fmt: skip
        """
        Args:
            numel: Entries of the whole tensor; any number.
            node_group: The ranks of this rank's node.
            across_group: The ranks at this one's place in their nodes; all nodes have as many ranks.
        """
        self.numel = numel
        self._node_ranks, self._nodes = dist.get_world_size(node_group), dist.get_world_size(across_group)
        ranks = self._node_ranks * self._nodes
        self.rank = dist.get_rank(across_group) * self._node_ranks + dist.get_rank(node_group)
        self.bounds = part_bounds(numel, ranks)
        self._size = -(-numel // ranks)
        self._inside = CompressedReduceScatter(ranks * self._size, node_group, node_wire, device)
        self._across = CompressedReduceScatter(self._nodes * self._size, across_group, across_wire, device)

    def reduce_scatter(self, whole: Tensor, out: Tensor | None = None, divisor: float = 1.0) -> Tensor:
        """As of CompressedReduceScatter."""
        return self.start(whole).wait(out, divisor)

    def start(self, whole: Tensor) -> Pending:
        """See ReduceScatter. Starts the sum inside the node; the one between nodes is done in wait."""
        if whole.numel() != self.numel:
            raise ValueError(f"reduce_scatter: whole has {whole.numel()} entries; it must have {self.numel}")
        flat = whole.detach().flatten()
        padding = self._nodes * self._node_ranks * self._size - self.numel
        if padding:
            flat = torch.cat([flat, flat.new_zeros(padding)])
        by_owner = flat.view(self._nodes, self._node_ranks, self._size).transpose(0, 1)
        return _PendingTwice(self, self._inside.start(by_owner.reshape(-1)))

    def finish(self, node_sum: Tensor, out: Tensor | None, divisor: float) -> Tensor:
        """The sum over the nodes of this rank's part of each node's sum."""
        first, last = self.bounds[self.rank]
        if out is not None and out.numel() != last - first:
            raise ValueError(f"reduce_scatter: out has {out.numel()} entries; rank {self.rank} owns {last - first}")
        part = self._across.reduce_scatter(node_sum, divisor=divisor)[: last - first]
        if out is None:
            return part
        out.view(-1).copy_(part)
        return out

    def undo(self) -> None:
        """See ReduceScatter."""
        self._inside.undo()
        self._across.undo()

    def reset(self) -> None:
        """See ReduceScatter."""
        self._inside.reset()
        self._across.reset()

    def state_dict(self) -> dict[str, Any]:
        """See ReduceScatter."""
        return {"inside": self._inside.state_dict(), "across": self._across.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See ReduceScatter."""
        self._inside.load_state_dict(state["inside"])
        self._across.load_state_dict(state["across"])


class _PendingTwice:
    def __init__(self, scatter: HierarchicalReduceScatter, inside: Pending) -> None:
        self._scatter, self._inside = scatter, inside

    def wait(self, out: Tensor | None = None, divisor: float = 1.0) -> Tensor:
        return self._scatter.finish(self._inside.wait(), out, divisor)
