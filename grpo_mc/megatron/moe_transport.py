"""Rows of tokens to the ranks of their experts and back: one message a rank each way, a token once for each rank.

A rank counts for whom it has rows, the ranks tell each other these counts in one small all-to-all, and then every
exchange is one all-to-all of bytes with splits that may be uneven or 0. What belongs to a row (its numbers, their
scales, its experts, its weights) lies side by side in the message, so that codes and scales never travel apart:

    | part 0 | part 1 | ... | up to a multiple of 16 bytes |     a row of the message, [bytes] uint8

Rows are sent in the order (destination rank, token) and received in the order (source rank, token), whatever threads
or timing do: what is computed from them is the same to the last bit in every run.

Every wait is bounded by the group's timeout. Gloo and NCCL take the same code.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_mc.ops.moe import moe_place, moe_plan, moe_unpermute

_ROW_ALIGN = 16
"""Bytes that the length of a message's row is a multiple of: what vector loads of a device want."""

Part = tuple[int, torch.dtype]
"""Columns and dtype of one part of a message."""


@dataclass(frozen=True)
class TokenTransport:
    """Which rows travel between this rank and the others of a group, in both directions; made by `plan_transport`."""

    group: dist.ProcessGroup
    row_map: Tensor
    """[T, C] int64: the rows of the message that are copies of a token, in the order of the ranks; -1 = none."""
    send_counts: tuple[int, ...]
    """Rows for each rank."""
    recv_counts: tuple[int, ...]
    """Rows from each rank."""

    @property
    def num_sent(self) -> int:
        """Rows that leave this rank's tokens, those for itself included."""
        return sum(self.send_counts)

    @property
    def num_received(self) -> int:
        """Rows that reach this rank's experts, those of itself included."""
        return sum(self.recv_counts)

    def send(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """What belongs to each token goes to every rank of the token.

        Args:
            parts: [T, C_i] of any dtypes; the same columns and dtypes on every rank.

        Returns:
            [num_received, C_i] for each part, in the order (source rank, token); views of one message.
        """
        message, slots = _message(self.num_sent, [_part_of(part) for part in parts], parts[0].device)
        for part, slot in zip(parts, slots, strict=True):
            moe_place(part, self.row_map, out=slot)
        received = _exchange(message, self.send_counts, self.recv_counts, self.group)
        return _slots(received, [_part_of(part) for part in parts])

    def send_back(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """The other direction: [num_received, C_i] -> [num_sent, C_i], in the order (rank, token) of `send`."""
        message, slots = _message(self.num_received, [_part_of(part) for part in parts], parts[0].device)
        for part, slot in zip(parts, slots, strict=True):
            slot.copy_(part)
        received = _exchange(message, self.recv_counts, self.send_counts, self.group)
        return _slots(received, [_part_of(part) for part in parts])

    def sum_rows(self, rows: Tensor) -> Tensor:
        """[num_sent, C] float32, bfloat16 or float64 -> [T, C]: the sum of a token's rows in the order of the ranks."""
        return moe_unpermute(rows, self.row_map, None)


def plan_transport(ranks: Tensor, group: dist.ProcessGroup, signature: Sequence[int] = ()) -> TokenTransport:
    """The transport of tokens to their ranks; a collective call.

    Args:
        ranks: [T, C] int64, the ranks (of the group) that a token goes to; -1 = none, repeated ones count once.
        group: Its timeout bounds every wait.
        signature: Numbers that have to be the same on every rank (sizes that the messages' layout follows from).

    Raises:
        ValueError: the signatures differ; on every rank.
    """
    world = dist.get_world_size(group)
    ranks = ranks.sort(dim=1).values
    ranks[:, 1:].masked_fill_(ranks[:, 1:] == ranks[:, :-1], -1)
    row_map, offsets = moe_plan(ranks, num_experts=world)
    own = torch.tensor([0, *signature], device=ranks.device).expand(world, -1).contiguous()
    own[:, 0] = offsets.diff()
    others = own if world == 1 else torch.empty_like(own)
    if world > 1:
        dist.all_to_all_single(others, own, group=group)
    counts = torch.stack([own[:, 0], others[:, 0]]).tolist()  # one wait for a device
    if not torch.equal(own[:, 1:], others[:, 1:]):
        raise ValueError(
            f"dispatch: the ranks of the group differ in their sizes: {own[0, 1:].tolist()} here,"
            f" {others[:, 1:].tolist()} by rank; give every rank the same columns, choices, experts and payload"
        )
    return TokenTransport(group, row_map, tuple(counts[0]), tuple(counts[1]))


def row_bytes(parts: Sequence[Part]) -> int:
    """Bytes of a message's row that holds these parts."""
    return _layout(parts)[1]


def _part_of(part: Tensor) -> Part:
    return part.shape[1], part.dtype


def _layout(parts: Sequence[Part]) -> tuple[list[int], int]:
    """Where each part begins, at a multiple of its element's size, and the bytes of a row."""
    starts, end = [], 0
    for columns, dtype in parts:
        starts.append(math.ceil(end / dtype.itemsize) * dtype.itemsize)
        end = starts[-1] + columns * dtype.itemsize
    return starts, math.ceil(end / _ROW_ALIGN) * _ROW_ALIGN


def _slots(message: Tensor, parts: Sequence[Part]) -> list[Tensor]:
    """Views of a message [rows, bytes] as its parts."""
    starts, _ = _layout(parts)
    return [
        message[:, start : start + columns * dtype.itemsize].view(dtype)
        for start, (columns, dtype) in zip(starts, parts, strict=True)
    ]


def _message(rows: int, parts: Sequence[Part], device: torch.device) -> tuple[Tensor, list[Tensor]]:
    message = torch.empty(rows, row_bytes(parts), dtype=torch.uint8, device=device)
    return message, _slots(message, parts)


def _exchange(message: Tensor, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    if dist.get_world_size(group) == 1:
        return message
    received = message.new_empty(sum(receive), message.shape[1])
    dist.all_to_all_single(received, message, list(receive), list(send), group=group)
    return received
