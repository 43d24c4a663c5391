"""The counts that the loss is divided by: of the whole batch of one optimizer step, over every micro-batch and rank.

Dividing a micro-batch by its own count and averaging afterwards weighs short micro-batches more (H12), so the counts
are taken once, before the first forward pass, and passed to every call of the loss. Masked tokens never count, nor do
sequences and groups without a token in the loss.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Denominators:
    """Counts of what is in the loss. Counts of disjoint parts add (a group must lie wholly in one part)."""

    tokens: int
    """Tokens with loss_mask true."""
    sequences: int
    """Sequences with at least one such token."""
    groups: int
    """Groups with at least one such sequence."""

    def __add__(self, other: Denominators) -> Denominators:
        return Denominators(self.tokens + other.tokens, self.sequences + other.sequences, self.groups + other.groups)

    def for_aggregation(self, aggregation: str) -> int:
        """The count that this aggregation divides by.

        Raises:
            ValueError: unknown aggregation.
        """
        if aggregation == "token_mean":
            return self.tokens
        if aggregation in ("sequence_mean_token_mean", "sequence_mean_token_sum", "sequence_mean_token_sum_norm"):
            return self.sequences
        if aggregation == "group_mean":
            return self.groups
        raise ValueError(f"Denominators: aggregation is {aggregation!r}; see grpo_mc.ops.reference.policy_loss")

    def to_tensor(self) -> Tensor:
        """[3] int64 (tokens, sequences, groups), ready to be summed over data-parallel ranks."""
        return torch.tensor([self.tokens, self.sequences, self.groups], dtype=torch.int64)

    @classmethod
    def from_tensor(cls, counts: Tensor) -> Denominators:
        """The inverse of to_tensor."""
        tokens, sequences, groups = (int(count) for count in counts.tolist())
        return cls(tokens, sequences, groups)


def count_denominators(loss_mask: Tensor, cu_seqlens: Tensor, sequence_groups: Tensor) -> Denominators:
    """Counts of one packed part of the batch.

    Args:
        loss_mask: [T] bool.
        cu_seqlens: [N + 1] int64.
        sequence_groups: [N] int64 group of each sequence.
    """
    per_sequence = _tokens_per_sequence(loss_mask, cu_seqlens)
    in_loss = per_sequence > 0
    return Denominators(
        tokens=int(per_sequence.sum()),
        sequences=int(in_loss.sum()),
        groups=len(torch.unique(sequence_groups[in_loss])),
    )


def count_batch(parts: Iterable[tuple[Tensor, Tensor, Tensor]], *, aggregation: str | None = None) -> Denominators:
    """Counts of several micro-batches of one rank's batch. Over ranks, sum to_tensor(): a group lies on one rank.

    Args:
        parts: (loss_mask [T], cu_seqlens [N + 1], sequence_groups [N]) of each micro-batch.
        aggregation: of the loss they are counted for.

    Returns:
        Denominators; a group that lies in several parts counts once.

    Raises:
        ValueError: aggregation is "group_mean" and a group lies in several parts, where its mean would be wrong.
    """
    tokens, sequences, group_ids = 0, 0, set[int]()
    for loss_mask, cu_seqlens, sequence_groups in parts:
        per_sequence = _tokens_per_sequence(loss_mask, cu_seqlens)
        tokens += int(per_sequence.sum())
        sequences += int((per_sequence > 0).sum())
        here = set(sequence_groups[per_sequence > 0].tolist())
        if aggregation == "group_mean" and here & group_ids:
            raise ValueError(
                f"count_batch: group {min(here & group_ids)} lies in several micro-batches but aggregation group_mean "
                f"takes its mean inside one; raise parallel.max_tokens_per_micro_batch until a whole group fits"
            )
        group_ids |= here
    return Denominators(tokens, sequences, len(group_ids))


def _tokens_per_sequence(loss_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[N] int64 tokens in the loss of each sequence."""
    running = torch.cat([torch.zeros(1, dtype=torch.int64, device=loss_mask.device), loss_mask.long().cumsum(0)])
    return running[cu_seqlens[1:]] - running[cu_seqlens[:-1]]
