"""group_advantages: hand-worked groups (H01, H02, H03), the reference over every option, the registrations."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_mc import ops
from grpo_mc.ops import reference
from helpers.compare import assert_close

BASELINES = ("mean", "leave_one_out")
SCALES = ("std", "leave_one_out_std", "batch_std", "none")


def advantages(rewards: list[float], groups: list[int] | None = None, **options) -> list[float]:
    ids = torch.tensor(groups if groups is not None else [0] * len(rewards))
    return ops.group_advantages(torch.tensor(rewards, dtype=torch.float32), ids, **options).tolist()


@pytest.mark.parametrize("value", (0.0, 1.0, 0.5, 0.1, 1e6))
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("baseline", BASELINES)
def test_constant_group_gets_exact_zeros(baseline: str, scale: str, value: float) -> None:
    """H01, also with eps 0."""
    assert advantages([value] * 7, baseline=baseline, scale=scale, eps=0.0, ddof=1) == [0.0] * 7


def test_statistics_are_the_groups_own() -> None:
    """H02 (a): over the batch it would be [-1.095, -0.896, 0.896, 1.095]."""
    assert advantages([0, 1, 10, 11], [0, 0, 1, 1], eps=0.0) == pytest.approx([-1, 1, -1, 1], abs=1e-6)


def test_ddof_is_the_configured_one() -> None:
    """H02 (b)."""
    assert advantages([1, 0, 0, 0], eps=0.0) == pytest.approx([1.7320508] + [-0.5773503] * 3, abs=1e-6)
    assert advantages([1, 0, 0, 0], eps=0.0, ddof=1) == pytest.approx([1.5] + [-0.5] * 3, abs=1e-6)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("ddof", (0, 1))
def test_group_of_one_is_zero_not_nan(ddof: int, baseline: str, scale: str) -> None:
    """H02 (c)."""
    assert advantages([0.7], baseline=baseline, scale=scale, ddof=ddof, eps=0.0) == [0.0]


@pytest.mark.parametrize("bad", (float("nan"), float("inf"), float("-inf")))
def test_unscored_rollout_leaves_the_others_alone(bad: float) -> None:
    """H03: the third rollout is unscored; another group is untouched; one valid rollout is not enough."""
    got = advantages([1, 0, bad, 1, 5, 7, 3, bad], [4, 4, 4, 4, 2, 2, 9, 9], eps=0.0)
    assert got == pytest.approx([0.7071068, -1.4142135, 0, 0.7071068, -1, 1, 0, 0], abs=1e-6)
    flag = ops.group_advantages(
        torch.tensor([1.0, 0, 123, 1]), torch.zeros(4).long(), eps=0.0, valid=torch.tensor([True, True, False, True])
    )
    assert flag.tolist() == pytest.approx([0.7071068, -1.4142135, 0, 0.7071068], abs=1e-6)


def test_leave_one_out_by_hand() -> None:
    got = advantages([1, 0, 0, 0], baseline="leave_one_out", scale="none")
    assert got == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])
    # Others of the first have std 0: not divided. Others of a zero: {1, 0, 0} with std sqrt(1/3).
    got = advantages([1, 0, 0, 0], baseline="leave_one_out", scale="leave_one_out_std", eps=0.0)
    assert got == pytest.approx([1.0] + [-1 / 3 * math.sqrt(3)] * 3, abs=1e-6)


def test_groups_may_interleave_and_have_any_ids() -> None:
    rewards, ids = [0.0, 10, 1, 11, 0, 1], [-5, 2**40, -5, 2**40, 7, 7]
    assert advantages(rewards, ids, eps=0.0) == pytest.approx([-1, -1, 1, 1, -1, 1], abs=1e-6)


def test_huge_offset_keeps_the_differences() -> None:
    """Rewards 2^20 + {0, 1/8}: a one-pass float32 variance would be noise."""
    base = float(2**20)
    assert advantages([base, base + 0.125, base, base + 0.125], eps=0.0) == pytest.approx([-1, 1, -1, 1], abs=1e-6)


def test_bound_of_the_population_std() -> None:
    """With baseline mean and ddof 0, |A| <= sqrt(n - 1)."""
    rewards = torch.rand(64, generator=torch.Generator().manual_seed(0)) ** 8
    rewards[0] = 50.0
    got = ops.group_advantages(rewards, torch.zeros(64).long(), eps=0.0)
    assert float(got.abs().max()) <= math.sqrt(63) + 1e-5


def test_empty_batch() -> None:
    assert ops.group_advantages(torch.zeros(0), torch.zeros(0).long()).shape == (0,)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("baseline", BASELINES)
def test_opcheck(baseline: str, scale: str) -> None:
    for dtype in (torch.float32, torch.float64):
        arguments = (torch.rand(6).to(dtype), torch.tensor([0, 0, 1, 1, 1, 2]), None, baseline, scale, 1, 1e-4)
        torch.library.opcheck(torch.ops.grpo_mc.group_advantages, arguments)


def test_one_and_two_threads_agree_bit_for_bit() -> None:
    rewards = torch.rand(4096, generator=torch.Generator().manual_seed(0))
    ids = torch.arange(4096) // 8
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            results.append(ops.group_advantages(rewards, ids))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*results)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"baseline": "median"}, "baseline is 'median'; use mean or leave_one_out"),
        ({"scale": "var"}, "scale is 'var'"),
        ({"ddof": 2}, "ddof is 2"),
        ({"eps": -1.0}, "eps is -1"),
        ({"group_ids": torch.zeros(3).long()}, "group_ids has shape"),
        ({"group_ids": torch.zeros(2)}, "group_ids has dtype Float"),
        ({"rewards": torch.zeros(2).int()}, "rewards are Int"),
        ({"valid": torch.zeros(2)}, "valid has dtype Float"),
    ],
)
def test_user_mistakes_are_value_errors(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ops.group_advantages(**{"rewards": torch.zeros(2), "group_ids": torch.zeros(2).long(), **change})


@settings(max_examples=100, deadline=None)
@given(
    size=st.integers(0, 40),
    num_groups=st.integers(1, 8),
    baseline=st.sampled_from(BASELINES),
    scale=st.sampled_from(SCALES),
    ddof=st.sampled_from([0, 1]),
    eps=st.sampled_from([0.0, 1e-6, 1e-4]),
    levels=st.sampled_from([2, 3, 1000]),
    offset=st.sampled_from([0.0, -3.0, 1e6]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    masked=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_fuzz_against_the_reference(
    size, num_groups, baseline, scale, ddof, eps, levels, offset, dtype, masked, seed
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rewards = (torch.randint(levels, (size,), generator=generator) / levels + offset).to(dtype)
    rewards[torch.rand(size, generator=generator) < 0.1] = float("nan")
    ids = torch.randint(num_groups, (size,), generator=generator) - 2
    valid = torch.rand(size, generator=generator) < 0.8 if masked else None
    options = {"baseline": baseline, "scale": scale, "ddof": ddof, "eps": eps, "valid": valid}
    got = ops.group_advantages(rewards, ids, **options)
    want = reference.group_advantages(rewards, ids, **options)
    assert_close(got, want, 1e-6, options)
