"""Sums into metrics: the names that metrics.jsonl, the report and the dashboards use.

Micro-batches and ranks add sums (policy_loss, correction); only here are they divided. A mean over nothing is left out,
never NaN and never an exception (H08); its count stays, as 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np

from grpo_mc.algorithms.advantages import AdvantageResult
from grpo_mc.algorithms.rewards import usable_reward
from grpo_mc.data.records import FinishReason, Group

_MEANS = {
    "policy/ratio_mean": ("ratio_sum", "token_count"),
    "policy/kl": ("kl_sum", "token_count"),
    "policy/entropy": ("entropy_sum", "token_count"),
    "policy/clip_frac_low": ("clip_low_count", "token_count"),
    "policy/clip_frac_high": ("clip_high_count", "token_count"),
    "policy/dual_clip_frac": ("dual_clip_count", "token_count"),
    "policy/surrogate": ("policy_loss_sum", "token_count"),
    "mismatch/logprob_abs_diff": ("mismatch_abs_sum", "mismatch_token_count"),
    "mismatch/k3": ("mismatch_k3_sum", "mismatch_token_count"),
    "mismatch/weight_mean": ("mismatch_weight_sum", "mismatch_token_count"),
    "mismatch/masked_frac": ("mismatch_masked_count", "mismatch_token_count"),
}


def add_sums(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The sums of several micro-batches added, name by name. Accepts numbers or 0-dim tensors."""
    total: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, 0.0) + float(value)
    return total


def loss_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Metrics of the loss from sums over the whole batch.

    Args:
        sums: as added up from PolicyLoss.metrics over micro-batches and ranks; absent names give no metric.

    Returns:
        policy/ratio_mean, policy/kl, policy/entropy, policy/clip_frac_low, policy/clip_frac_high,
        policy/dual_clip_frac, policy/surrogate, policy/token_count, mismatch/logprob_abs_diff, mismatch/k3,
        mismatch/weight_mean, mismatch/masked_frac, mismatch/effective_sample_size (in (0, 1]).
    """
    metrics = {
        name: float(sums[total]) / float(sums[count])
        for name, (total, count) in _MEANS.items()
        if total in sums and float(sums.get(count, 0.0)) > 0
    }
    if "token_count" in sums:
        metrics["policy/token_count"] = float(sums["token_count"])
    squares = float(sums.get("mismatch_weight_sq_sum", 0.0)) * float(sums.get("mismatch_token_count", 0.0))
    if squares > 0:
        metrics["mismatch/effective_sample_size"] = float(sums["mismatch_weight_sum"]) ** 2 / squares
    return metrics


def batch_metrics(groups: list[Group], result: AdvantageResult) -> dict[str, float]:
    """Metrics of rewards and responses of a batch of scored groups.

    Args:
        groups: the groups that `result` was computed from.
        result: their advantages.

    Returns:
        reward/mean, reward/std (ddof 0, over the valid rollouts' task rewards, before any shaping),
        reward/<name>/mean over the rollouts that this reward function scored, group/zero_std_frac over the groups not
        dropped, response/length_mean (tokens), response/truncated_frac, advantage/abs_max, and the counters.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    scores = [score for score in map(usable_reward, rollouts) if score is not None]
    metrics: dict[str, float] = {}
    if scores:
        metrics["reward/mean"] = float(np.mean(scores))
        metrics["reward/std"] = float(np.std(scores))
    for name in sorted({name for rollout in rollouts for name in rollout.rewards}):
        values = [rollout.rewards[name] for rollout in rollouts if name in rollout.rewards]
        finite = [value for value in values if math.isfinite(value)]
        if finite:
            metrics[f"reward/{name}/mean"] = float(np.mean(finite))
    num_compared = int((~result.dropped).sum())
    if num_compared:
        metrics["group/zero_std_frac"] = int(result.zero_variance.sum()) / num_compared
    if rollouts:
        metrics["response/length_mean"] = float(np.mean([rollout.response_length for rollout in rollouts]))
        truncated = sum(rollout.finish_reason is FinishReason.TRUNCATED for rollout in rollouts)
        metrics["response/truncated_frac"] = truncated / len(rollouts)
        metrics["advantage/abs_max"] = float(result.advantages.abs().max())
    return {**metrics, **{name: float(count) for name, count in result.counters.items()}}
