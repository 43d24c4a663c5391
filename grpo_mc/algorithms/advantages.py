"""Advantages of a training batch: records in, one float32 per rollout out.

Order of the steps, each switched by section `algorithm` (rewards.py has the formulas):

    1. validity        unscored, not finite or failed: out of everything
    2. overlong        soft penalty near the length limit
    3. zero variance   flagged here: constant in the float32 rewards of step 2, before the KL, which is never constant
    4. KL in reward    r_i <- r_i - beta * sum k1
    5. quantile        per group
    6. group_advantages (baseline, scale, ddof, eps)

A group with fewer than two valid rollouts is dropped and counted: it has nothing to be compared with. (Some projects
train a lone rollout on A = r; that is a gradient without a baseline.) A constant group keeps A = 0 and stays in the
loss unless the filter takes it out: with a KL term in the loss its KL gradient is meant to flow.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from grpo_mc.algorithms.rewards import (
    is_constant,
    kl_in_reward,
    overlong_penalty,
    quantile_normalise,
    usable_reward,
)
from grpo_mc.config import AlgorithmConfig
from grpo_mc.data.records import FinishReason, Group, Rollout
from grpo_mc.ops import group_advantages


@dataclass(frozen=True)
class AdvantageResult:
    """Advantages of N rollouts in G groups. Rollouts are in the order of the groups, then of `group.rollouts`."""

    advantages: Tensor
    """[N] float32, 0 where invalid or dropped."""
    rewards: Tensor
    """[N] float32 the rewards that entered group_advantages, NaN where invalid."""
    valid: Tensor
    """[N] bool, scored with a finite reward."""
    in_loss: Tensor
    """[N] bool, valid, in a group that was not dropped, and not masked as truncated. False = loss mask 0 and out of
    the denominators."""
    zero_variance: Tensor
    """[G] bool, at least two valid rollouts and all their rewards equal."""
    dropped: Tensor
    """[G] bool, fewer than two valid rollouts."""
    counters: dict[str, int]
    """Counts over the batch: rollouts/unscored, rollouts/non_finite_reward, rollouts/truncated_masked,
    rollouts/overlong_penalized, groups/dropped, groups/zero_variance."""
    offsets: tuple[int, ...]
    """[G + 1] group g is rows offsets[g] : offsets[g + 1]."""

    def of_group(self, group: int) -> Tensor:
        """[n] float32 advantages of the group at this position."""
        return self.advantages[self.offsets[group] : self.offsets[group + 1]]


def compute_advantages(
    groups: list[Group], algorithm: AlgorithmConfig, *, max_new_tokens: int | None = None
) -> AdvantageResult:
    """Advantages, validity and counts of a batch of scored groups.

    Args:
        groups: each with its rollouts' rewards filled.
        algorithm: resolved section `algorithm`.
        max_new_tokens: limit of a response, tokens; required with algorithm.overlong_buffer.

    Returns:
        AdvantageResult.

    Raises:
        ValueError: overlong_buffer without max_new_tokens; KL in the reward without reference log-probs.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    sizes = [len(group.rollouts) for group in groups]
    offsets = tuple(int(offset) for offset in np.cumsum([0, *sizes]))
    values, num_penalized = _shaped_rewards(rollouts, algorithm, max_new_tokens)
    valid = np.array([value is not None for value in values], bool)
    rewards = np.array([np.nan if value is None else value for value in values], np.float64)

    zero_variance, dropped = np.zeros(len(groups), bool), np.zeros(len(groups), bool)
    for g in range(len(groups)):
        rows = np.flatnonzero(valid[offsets[g] : offsets[g + 1]]) + offsets[g]
        dropped[g] = len(rows) < 2
        zero_variance[g] = len(rows) >= 2 and is_constant(rewards[rows].tolist())
        if algorithm.beta > 0 and algorithm.kl_placement == "in_reward":
            rewards[rows] += [kl_in_reward(rollouts[row], algorithm.beta) for row in rows]
        if algorithm.quantile is not None:
            rewards[rows] = quantile_normalise(rewards[rows], algorithm.quantile)

    group_rows = torch.repeat_interleave(torch.arange(len(groups)), torch.tensor(sizes, dtype=torch.int64))
    rewards_f32 = torch.from_numpy(rewards.astype(np.float32))
    valid_t = torch.from_numpy(valid)
    advantages = group_advantages(
        rewards_f32,
        group_rows,
        baseline=algorithm.baseline,
        scale=algorithm.scale,
        ddof=algorithm.ddof,
        eps=algorithm.eps,
        valid=valid_t,
    )
    dropped_t = torch.from_numpy(dropped)
    truncated = torch.tensor([r.finish_reason is FinishReason.TRUNCATED for r in rollouts], dtype=torch.bool)
    kept = valid_t & ~dropped_t[group_rows]
    in_loss = kept & ~truncated if algorithm.mask_truncated else kept
    num_unscored = sum(_has_no_score(rollout) for rollout in rollouts)
    counters = {
        "rollouts/unscored": num_unscored,
        "rollouts/non_finite_reward": int((~valid_t).sum()) - num_unscored,
        "rollouts/truncated_masked": int((kept & ~in_loss).sum()),
        "rollouts/overlong_penalized": num_penalized,
        "groups/dropped": int(dropped.sum()),
        "groups/zero_variance": int(zero_variance.sum()),
    }
    return AdvantageResult(
        advantages, rewards_f32, valid_t, in_loss, torch.from_numpy(zero_variance), dropped_t, counters, offsets
    )


def _has_no_score(rollout: Rollout) -> bool:
    """Invalid for another reason than a number that is not finite."""
    return rollout.reward is None or rollout.finish_reason is FinishReason.FAILED


def _shaped_rewards(
    rollouts: list[Rollout], algorithm: AlgorithmConfig, max_new_tokens: int | None
) -> tuple[list[float | None], int]:
    """[N] rewards after the overlong penalty, None where invalid; and how many were penalised."""
    values = [usable_reward(rollout) for rollout in rollouts]
    buffer = algorithm.overlong_buffer
    if buffer is None:
        return values, 0
    if max_new_tokens is None:
        raise ValueError(
            f"compute_advantages: algorithm.overlong_buffer is {buffer} but max_new_tokens is None; "
            f"pass rollout.max_new_tokens"
        )
    num_penalized = 0
    for row, (rollout, value) in enumerate(zip(rollouts, values, strict=True)):
        if value is None:
            continue
        amount = overlong_penalty(rollout.response_length, max_new_tokens, buffer, algorithm.overlong_penalty)
        num_penalized += amount < 0
        values[row] = value + amount
    return values, num_penalized
