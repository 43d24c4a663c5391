"""The plain group_advantages, against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_mc.ops.reference import group_advantages

NAN, INF = float("nan"), float("inf")


def advantages(groups: list[list[float]], **options: object) -> list[float]:
    rewards = torch.tensor([r for group in groups for r in group], dtype=torch.float32)
    ids = torch.tensor([g for g, group in enumerate(groups) for _ in group], dtype=torch.int64)
    return group_advantages(rewards, ids, **{"eps": 1e-6, **options}).tolist()  # type: ignore[arg-type]


@pytest.mark.parametrize("reward", [1.0, 0.0, 0.5, 0.1, 1e-30, -7.3, 16777217.0])
@pytest.mark.parametrize("scale", ["std", "leave_one_out_std", "batch_std", "none"])
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
def test_constant_group_has_advantage_exactly_zero(reward: float, scale: str, baseline: str) -> None:
    """H01: also where the mean of equal numbers rounds, and whatever the other groups are."""
    got = advantages([[reward] * 7, [0.0, 1.0]], scale=scale, baseline=baseline, eps=0.0)
    assert got[:7] == [0.0] * 7
    assert all(math.isfinite(a) and a != 0 for a in got[7:])


def test_statistics_are_of_the_group_not_the_batch() -> None:
    """H02 (a)."""
    assert advantages([[0, 1], [10, 11]]) == pytest.approx([-1, 1, -1, 1], abs=1e-5)


def test_ddof_0_and_1_give_their_own_numbers() -> None:
    """H02 (b)."""
    assert advantages([[1, 0, 0, 0]], ddof=0) == pytest.approx([1.73205, -0.57735, -0.57735, -0.57735], abs=1e-4)
    assert advantages([[1, 0, 0, 0]], ddof=1) == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-4)


@pytest.mark.parametrize("scale", ["std", "leave_one_out_std", "batch_std", "none"])
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("ddof", [0, 1])
def test_lone_rollout_has_advantage_zero(scale: str, baseline: str, ddof: int) -> None:
    """H02 (c): never 0.7, never NaN."""
    assert advantages([[0.7]], scale=scale, baseline=baseline, ddof=ddof) == [0.0]


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_unscored_rollout_leaves_the_statistics_of_its_siblings(bad: float) -> None:
    """H03: the others count three, another group does not notice."""
    got = advantages([[1, 0, bad, 1], [0, 1]])
    assert got == pytest.approx([0.70711, -1.41421, 0, 0.70711, -1, 1], abs=1e-4)
    assert got[2] == 0.0


def test_valid_mask_takes_out_a_finite_reward() -> None:
    rewards = torch.tensor([1.0, 0.0, 5.0, 1.0])
    valid = torch.tensor([True, True, False, True])
    got = group_advantages(rewards, torch.zeros(4, dtype=torch.int64), valid=valid, eps=1e-6)
    assert got.tolist() == pytest.approx([0.70711, -1.41421, 0, 0.70711], abs=1e-4)


def test_group_with_one_valid_rollout_is_zero() -> None:
    assert advantages([[1, NAN, NAN]], scale="none") == [0.0, 0.0, 0.0]


def test_leave_one_out_baseline() -> None:
    """b_i is the mean of the others: 1 - 1/3, 0 - 2/3, ..."""
    got = advantages([[1, 0, 0, 1]], baseline="leave_one_out", scale="none")
    assert got == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3], abs=1e-6)


def test_leave_one_out_std() -> None:
    """Others of the first: 0, 0, 1 (std sqrt(1/3)); of the second: 1, 0, 1 (the same)."""
    got = advantages([[1, 0, 0, 1]], baseline="leave_one_out", scale="leave_one_out_std", eps=0.0)
    assert got == pytest.approx([2 / math.sqrt(3), -2 / math.sqrt(3), -2 / math.sqrt(3), 2 / math.sqrt(3)], abs=1e-5)


def test_leave_one_out_std_does_not_explode_when_the_others_agree() -> None:
    """The others of the lone success have std 0, then almost 0: both keep r - b."""
    assert advantages([[1, 0, 0, 0]], baseline="leave_one_out", scale="leave_one_out_std")[0] == 1.0
    near = advantages([[1, 0, 1e-5, 0]], baseline="leave_one_out", scale="leave_one_out_std", eps=0.0)
    assert near[0] == pytest.approx(1.0, abs=1e-4)


def test_batch_std_divides_the_group_difference_by_the_std_of_all() -> None:
    """Rewards 0, 1, 10, 11: mean 5.5, variance (5.5^2 + 4.5^2) = 50.5 / 2 = 25.25."""
    got = advantages([[0, 1], [10, 11]], scale="batch_std", eps=0.0)
    assert got == pytest.approx([x / math.sqrt(25.25) for x in (-0.5, 0.5, -0.5, 0.5)], abs=1e-6)


def test_large_common_offset_loses_nothing() -> None:
    """Two passes in float64: E[r^2] - E[r]^2 in float32 would give 0 or noise here."""
    assert advantages([[1e7, 1e7 + 1]]) == pytest.approx([-1, 1], abs=1e-5)


def test_ids_in_any_order_and_of_any_value() -> None:
    rewards = torch.tensor([0.0, 10.0, 1.0, 11.0])
    got = group_advantages(rewards, torch.tensor([2**40, -3, 2**40, -3]), eps=1e-6)
    assert got.tolist() == pytest.approx([-1, -1, 1, 1], abs=1e-5)


def test_no_rollouts() -> None:
    assert group_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=2, max_size=16))
@settings(max_examples=80, deadline=None)
def test_advantages_are_bounded_by_the_square_root_of_the_others(rewards: list[float]) -> None:
    """|A| <= sqrt(n - 1) for baseline mean and ddof 0."""
    got = torch.tensor(advantages([rewards], eps=0.0))
    assert bool(torch.isfinite(got).all())
    assert float(got.abs().max()) <= math.sqrt(len(rewards) - 1) * (1 + 1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"baseline": "median"}, "baseline is 'median'"),
        ({"scale": "var"}, "scale is 'var'"),
        ({"ddof": 2}, "ddof is 2"),
        ({"eps": -1.0}, "eps is -1.0"),
        ({"valid": torch.ones(3, dtype=torch.bool)}, "same"),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        group_advantages(torch.zeros(2), torch.zeros(2, dtype=torch.int64), **options)  # type: ignore[arg-type]
