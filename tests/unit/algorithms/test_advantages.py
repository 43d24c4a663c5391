"""From scored records to advantages: validity, shaping, flags and counts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from grpo_mc.algorithms import compute_advantages, filter_groups
from grpo_mc.algorithms.rewards import is_constant, overlong_penalty, quantile_normalise
from grpo_mc.config import AlgorithmConfig
from grpo_mc.data.records import FinishReason, Group, Prompt, Rollout, Segment

PROMPT = Prompt("test:0", np.array([1, 2], np.int64), "p")


def make_group(group_id: int, rewards: Sequence[float | None], lengths: Sequence[int] | None = None) -> Group:
    """A group whose rollout i has rewards[i] and lengths[i] tokens (3 unless given) with rollout log-probs -1."""
    rollouts = []
    for i, reward in enumerate(rewards):
        length = 3 if lengths is None else lengths[i]
        segment = Segment("model", np.arange(length), np.full(length, -1.0, np.float32))
        rollouts.append(Rollout(group_id, i, PROMPT, [segment], "", FinishReason.FINISHED, (0,), reward=reward))
    return Group(group_id, PROMPT, rollouts)


def algorithm(**fields: Any) -> AlgorithmConfig:
    return AlgorithmConfig(**{"eps": 1e-6, **fields})


def test_group_statistics_and_layout() -> None:
    """H02 (a), and the order: groups, then rollouts."""
    result = compute_advantages([make_group(7, [0, 1]), make_group(3, [10, 11])], algorithm())
    assert result.advantages.tolist() == pytest.approx([-1, 1, -1, 1], abs=1e-5)
    assert result.advantages.dtype == torch.float32
    assert result.offsets == (0, 2, 4)
    assert result.of_group(1).tolist() == pytest.approx([-1, 1], abs=1e-5)
    assert result.in_loss.all() and result.valid.all() and not result.zero_variance.any()


def test_zero_variance_groups_are_found_whatever_their_mean() -> None:
    """H01: all ones, all zeros and a constant graded reward; with the filter all three go, and are counted."""
    groups = [make_group(g, [r] * 4) for g, r in enumerate((1.0, 0.0, 0.5))] + [make_group(3, [0.0, 0.5, 0.5, 1.0])]
    result = compute_advantages(groups, algorithm())
    assert result.advantages[:12].tolist() == [0.0] * 12
    assert result.zero_variance.tolist() == [True, True, True, False]
    assert result.counters["groups/zero_variance"] == 3
    assert filter_groups(result, algorithm(filter_zero_variance=True)).filtered == (0, 1, 2)
    # With the filter off they stay in the loss, so that a KL term in the loss still pulls on them.
    assert filter_groups(result, algorithm()).kept == (0, 1, 2, 3)
    assert result.in_loss.all()


@pytest.mark.parametrize("bad", [None, math.nan, math.inf, -math.inf, 1e39])
def test_unscored_rollout_is_out_of_everything(bad: float | None) -> None:
    """H03; 1e39 is infinite in float32."""
    result = compute_advantages([make_group(0, [1, 0, bad, 1]), make_group(1, [0, 1, 0, 1])], algorithm())
    assert result.advantages[:4].tolist() == pytest.approx([0.70711, -1.41421, 0, 0.70711], abs=1e-4)
    assert result.advantages[4:].tolist() == pytest.approx([-1, 1, -1, 1], abs=1e-4)
    assert result.valid.tolist() == result.in_loss.tolist() == [True, True, False] + [True] * 5
    assert math.isnan(result.rewards[2])
    assert result.counters["rollouts/unscored"] == (bad is None)
    assert result.counters["rollouts/non_finite_reward"] == (bad is not None)


def test_failed_rollout_is_unscored_even_with_a_reward() -> None:
    group = make_group(0, [1, 0, 5])
    group.rollouts[2].finish_reason = FinishReason.FAILED
    result = compute_advantages([group], algorithm())
    assert result.advantages.tolist() == pytest.approx([1, -1, 0], abs=1e-4)
    assert result.counters["rollouts/unscored"] == 1


@pytest.mark.parametrize("scale", ["std", "none"])
def test_group_with_fewer_than_two_valid_rollouts_is_dropped(scale: str) -> None:
    """H03, H02 (c): nothing to compare with, so A = 0 and no loss, not A = r."""
    groups = [make_group(0, [0.7, None]), make_group(1, [None, math.nan]), make_group(2, []), make_group(3, [0, 1])]
    result = compute_advantages(groups, algorithm(scale=scale))
    assert result.advantages[:4].tolist() == [0.0] * 4
    assert result.in_loss.tolist() == [False] * 4 + [True] * 2
    assert result.dropped.tolist() == [True, True, True, False]
    assert not result.zero_variance.any()
    assert result.counters["groups/dropped"] == 3
    assert filter_groups(result, algorithm()).dropped == (0, 1, 2)


def test_no_groups() -> None:
    result = compute_advantages([], algorithm())
    assert result.advantages.shape == (0,) and result.counters["groups/dropped"] == 0


@pytest.mark.parametrize(("length", "penalty"), [(0, 0.0), (80, 0.0), (81, -0.1), (90, -1.0), (100, -2.0), (120, -2.0)])
def test_overlong_penalty_grows_over_the_buffer(length: int, penalty: float) -> None:
    assert overlong_penalty(length, 100, 20, 2.0) == pytest.approx(penalty)


def test_overlong_penalty_moves_rewards_and_is_counted() -> None:
    groups = [make_group(0, [1, 1, 1], lengths=[5, 9, 10])]
    result = compute_advantages(
        groups, algorithm(overlong_buffer=4, overlong_penalty=1.0, scale="none"), max_new_tokens=10
    )
    assert result.rewards.tolist() == pytest.approx([1.0, 0.25, 0.0])
    assert result.counters["rollouts/overlong_penalized"] == 2
    assert not result.zero_variance.any()  # the penalty is a difference worth training on


def test_overlong_without_the_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="max_new_tokens is None"):
        compute_advantages([make_group(0, [1, 0])], algorithm(overlong_buffer=4))
    with pytest.raises(ValueError, match="max_new_tokens is 3"):
        compute_advantages([make_group(0, [1, 0])], algorithm(overlong_buffer=4), max_new_tokens=3)


def test_masked_truncated_rollout_keeps_its_place_in_the_statistics() -> None:
    group = make_group(0, [1, 0, 0, 1])
    group.rollouts[1].finish_reason = FinishReason.TRUNCATED
    result = compute_advantages([group], algorithm(mask_truncated=True))
    assert result.advantages.tolist() == pytest.approx([1, -1, -1, 1], abs=1e-4)
    assert result.in_loss.tolist() == [True, False, True, True]
    assert result.counters["rollouts/truncated_masked"] == 1


def test_kl_in_the_reward_uses_sampled_tokens_only() -> None:
    """Rollout log-probs -1, reference -1.5: k1 = 0.5 for each of three tokens; the tool's token has none."""
    group = make_group(0, [1, 1])
    group.rollouts[0].ref_logprobs = np.full(4, -1.5, np.float32)
    group.rollouts[0].segments.append(Segment("tool", np.array([9])))
    group.rollouts[1].ref_logprobs = np.full(3, -1.0, np.float32)
    config = algorithm(beta=0.1, kl="k1", kl_placement="in_reward", scale="none")
    result = compute_advantages([group], config)
    assert result.rewards.tolist() == pytest.approx([0.85, 1.0])
    assert result.advantages.tolist() == pytest.approx([-0.075, 0.075])
    assert result.zero_variance.tolist() == [True]  # judged on the task's reward: KL alone is never constant
    group.rollouts[1].ref_logprobs = None
    with pytest.raises(ValueError, match="0/1 has no ref_logprobs"):
        compute_advantages([group], config)


def test_quantile_normalisation_bounds_an_outlier() -> None:
    """0 .. 4 and 1000: the range [0.25, 0.75] is 1.25 to 3.75."""
    got = quantile_normalise([0, 1, 2, 3, 4, 1000], 0.25)
    assert got.tolist() == pytest.approx([0, 0, 0.3, 0.7, 1, 1])
    result = compute_advantages([make_group(0, [0, 1, 2, 3, 4, 1000])], algorithm(quantile=0.25, scale="none"))
    assert result.advantages.tolist() == pytest.approx([-0.5, -0.5, -0.2, 0.2, 0.5, 0.5])


def test_quantile_range_of_width_zero_keeps_the_lone_success() -> None:
    assert quantile_normalise([0, 0, 0, 0, 1], 0.25).tolist() == [0, 0, 0, 0, 1]
    assert quantile_normalise([], 0.25).tolist() == []


def test_constancy_is_exact_in_float32() -> None:
    assert is_constant([0.1, 0.1 + 1e-12]) and not is_constant([0.1, 0.1 + 1e-8])
    assert is_constant([0.5]) and is_constant([])
