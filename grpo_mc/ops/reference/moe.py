"""Mixture of experts, choice by choice in Python loops."""

from __future__ import annotations

import torch
from torch import Tensor


def moe_route(
    logits: Tensor, *, top_k: int, score: str = "softmax", bias: Tensor | None = None, normalize: bool = False
) -> tuple[Tensor, Tensor]:
    """The experts of each token, best biased score first and ties to the lower expert, and their unbiased scores."""
    scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
    biased = scores.detach() if bias is None else scores.detach() + bias
    ids = []
    for row in biased.tolist():
        ids.append(sorted(range(len(row)), key=lambda e: (-row[e], e))[:top_k])
    expert_ids = torch.tensor(ids, dtype=torch.int64).view(len(ids), top_k)
    probs = scores.gather(1, expert_ids)
    return expert_ids, probs / probs.sum(-1, keepdim=True) if normalize else probs


def moe_permute(
    x: Tensor,
    expert_ids: Tensor,
    probs: Tensor,
    *,
    num_experts: int,
    capacity: int | None = None,
    align: int = 1,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(rows, row_probs, row_map, offsets); see grpo_mc.ops.moe."""
    rows: list[Tensor] = []
    row_probs: list[Tensor] = []
    offsets = [0]
    row_map = torch.full_like(expert_ids, -1)
    for expert in range(num_experts):
        count = 0
        for token, choice in (expert_ids == expert).nonzero().tolist():
            if capacity is None or count < capacity:
                row_map[token, choice] = len(rows)
                rows.append(x[token])
                row_probs.append(probs[token, choice])
                count += 1
        while len(rows) % align:
            rows.append(torch.zeros_like(x[0]))
            row_probs.append(torch.zeros_like(probs[0, 0]))
        offsets.append(len(rows))
    stacked = torch.stack(rows) if rows else x[:0]
    stacked_probs = torch.stack(row_probs) if rows else probs.flatten()[:0]
    if out is not None:
        stacked = out[: len(rows)].copy_(stacked)
    return stacked, stacked_probs, row_map, torch.tensor(offsets)


def moe_unpermute(rows: Tensor, row_map: Tensor, probs: Tensor | None, *, out: Tensor | None = None) -> Tensor:
    """Each token's sum of prob * row over its choices, [T, H]."""
    weights = torch.ones(row_map.shape, dtype=rows.dtype) if probs is None else probs
    taken = rows[row_map.clamp_min(0)] if len(rows) else rows.new_zeros(*row_map.shape, rows.shape[1])
    taken = torch.where((row_map >= 0)[..., None], taken, torch.zeros((), dtype=rows.dtype))
    total = (taken * weights[..., None].to(taken.dtype)).sum(1)
    return total if out is None else out.copy_(total)
