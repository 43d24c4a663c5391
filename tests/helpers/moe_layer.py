"""A layer of experts over several ranks, slowly: everything in one process, token by token, for any ranks' inputs.

It says what grpo_mc.megatron.moe_dispatch means: which rows an expert sees and in which order, and what a token gets
back. Autograd goes through it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Experts = Callable[[int, int, Tensor], Tensor]
"""(expert, part, rows [R, H]) -> [R, H]."""


@dataclass
class RankTokens:
    """One rank's input of a dispatch."""

    x: Tensor
    expert_ids: Tensor
    probs: Tensor


@dataclass
class Row:
    """A row that an expert sees: whose choice it is."""

    rank: int
    token: int
    choice: int


def rows_of_expert(ranks: Sequence[RankTokens], expert: int, capacity: int | None) -> list[Row]:
    """In the order (source rank, token, choice), the first `capacity` of them."""
    rows = []
    for rank, tokens in enumerate(ranks):
        for token, choice in (tokens.expert_ids == expert).nonzero().tolist():
            rows.append(Row(rank, token, choice))
    return rows[:capacity]


def expected_rows(
    ranks: Sequence[RankTokens], experts: Sequence[int], capacity: int | None, align: int
) -> tuple[Tensor, Tensor, list[int]]:
    """(rows [R, H], row_probs [R], offsets) of the rank that holds `experts`."""
    x, probs = ranks[0].x, ranks[0].probs
    rows, row_probs, offsets = [x[:0]], [probs.flatten()[:0]], [0]
    for expert in experts:
        for row in rows_of_expert(ranks, expert, capacity):
            rows.append(ranks[row.rank].x[row.token][None])
            row_probs.append(ranks[row.rank].probs[row.token, row.choice][None])
        fill = -sum(map(len, row_probs)) % align
        rows.append(x.new_zeros(fill, x.shape[1]))
        row_probs.append(probs.new_zeros(fill))
        offsets.append(sum(map(len, row_probs)))
    return torch.cat(rows), torch.cat(row_probs), offsets


def layer_output(
    ranks: Sequence[RankTokens], num_experts: int, experts: Experts, *, parts: int, capacity: int | None, weighted: bool
) -> list[Tensor]:
    """[T, H] of every rank: the sum over a token's kept choices of prob * (sum over the expert's parts)."""
    outputs = [tokens.x * 0 for tokens in ranks]
    for expert in range(num_experts):
        for row in rows_of_expert(ranks, expert, capacity):
            tokens = ranks[row.rank]
            total = sum(experts(expert, part, tokens.x[row.token][None])[0] for part in range(parts))
            prob = tokens.probs[row.token, row.choice] if weighted else 1.0
            outputs[row.rank] = outputs[row.rank].index_add(0, torch.tensor([row.token]), (prob * total)[None])
    return outputs
