"""Metrics of rewards and responses."""

from __future__ import annotations

import math

import numpy as np
import pytest

from grpo_mc.algorithms import batch_metrics, compute_advantages
from grpo_mc.config import AlgorithmConfig
from grpo_mc.data.records import FinishReason, Group, Prompt, Rollout, Segment

PROMPT = Prompt("test:0", np.array([1], np.int64), "p")


def rollout(reward: float | None, length: int, truncated: bool = False, **scores: float) -> Rollout:
    segments = [Segment("model", np.zeros(length, np.int64), np.zeros(length, np.float32))]
    reason = FinishReason.TRUNCATED if truncated else FinishReason.FINISHED
    return Rollout(0, 0, PROMPT, segments, "", reason, (0,), reward=reward, rewards=scores)


def test_names_and_values() -> None:
    groups = [
        Group(0, PROMPT, [rollout(1.0, 2, exact=1.0), rollout(0.0, 4, truncated=True, exact=0.0, format=0.5)]),
        Group(1, PROMPT, [rollout(0.5, 6), rollout(0.5, 8), rollout(None, 0)]),
        Group(2, PROMPT, [rollout(3.0, 4), rollout(math.nan, 0)]),
    ]
    metrics = batch_metrics(groups, compute_advantages(groups, AlgorithmConfig()))
    scores = [1.0, 0.0, 0.5, 0.5, 3.0]
    expected = {
        "reward/mean": 1.0,
        "reward/std": float(np.std(scores)),
        "reward/exact/mean": 0.5,
        "reward/format/mean": 0.5,
        "group/zero_std_frac": 0.5,
        "response/length_mean": 24 / 7,
        "response/truncated_frac": 1 / 7,
        "rollouts/unscored": 1,
        "rollouts/non_finite_reward": 1,
        "groups/dropped": 1,
        "groups/zero_variance": 1,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert metrics["advantage/abs_max"] == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("groups", [[], [Group(0, PROMPT, [])], [Group(0, PROMPT, [rollout(None, 0)] * 2)]])
def test_nothing_scored_gives_counts_and_no_means(groups: list[Group]) -> None:
    """H08: never a mean of nothing, never an exception."""
    metrics = batch_metrics(groups, compute_advantages(groups, AlgorithmConfig()))
    assert not {"reward/mean", "reward/std", "group/zero_std_frac"} & set(metrics)
    assert metrics["groups/dropped"] == len(groups)
    assert all(math.isfinite(value) for value in metrics.values())
