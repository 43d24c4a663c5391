"""The prompt sampler: orders, resuming, group ids."""

from __future__ import annotations

import json

import pytest

from grpo_mc.data.sampler import PromptSampler


def indices(sampler: PromptSampler, count: int) -> list[int]:
    return [draw.index for draw in sampler.draw(count)]


def resumed(sampler: PromptSampler, **options) -> PromptSampler:
    """Through JSON, as a checkpoint does it, into a new object."""
    fresh = PromptSampler(10, seed=3, **options)
    fresh.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
    return fresh


def test_second_resume_in_an_epoch_goes_on_in_order():
    """H24: 2 batches of 2, save and load, 1 batch, save and load, the rest; then the second epoch."""
    uninterrupted = indices(PromptSampler(10, seed=3), 20)
    sampler = PromptSampler(10, seed=3)
    joined = indices(sampler, 2) + indices(sampler, 2)
    sampler = resumed(sampler)
    joined += indices(sampler, 2)
    sampler = resumed(sampler)
    joined += indices(sampler, 4)
    assert sorted(joined) == list(range(10))
    joined += indices(sampler, 10)
    assert joined == uninterrupted


def test_resume_exactly_at_the_end_of_an_epoch():
    """H24: the second epoch has the same order as without a stop."""
    uninterrupted = indices(PromptSampler(10, seed=3), 20)
    sampler = PromptSampler(10, seed=3)
    first = indices(sampler, 10)
    second = indices(resumed(sampler), 10)
    assert first + second == uninterrupted
    assert sorted(second) == list(range(10)) and first != second


def test_draws_run_over_the_end_of_an_epoch_with_rising_group_ids():
    draws = PromptSampler(3, seed=0).draw(4) + PromptSampler(3, seed=0).draw(0)
    assert [draw.group_id for draw in draws] == [0, 1, 2, 3]
    assert [draw.epoch for draw in draws] == [0, 0, 0, 1]
    sampler = PromptSampler(10, seed=3)
    ids = [draw.group_id for _ in range(7) for draw in sampler.draw(3)]
    assert ids == list(range(21)) and sampler.num_drawn == 21
    assert [draw.group_id for draw in resumed(sampler).draw(2)] == [21, 22]


def test_order_is_fixed_for_good():
    """The order is part of what a resumed run relies on: other numbers here break resuming old runs."""
    assert indices(PromptSampler(10, seed=3), 10) == [3, 6, 1, 9, 7, 5, 4, 0, 2, 8]


def test_seed_and_epoch_change_the_order():
    orders = {tuple(indices(PromptSampler(50, seed=seed), 50)) for seed in range(5)}
    assert len(orders) == 5
    sampler = PromptSampler(50, seed=0)
    assert len({tuple(indices(sampler, 50)) for _ in range(5)}) == 5


def test_every_place_is_about_equally_likely():
    first = [indices(PromptSampler(4, seed=seed), 1)[0] for seed in range(2000)]
    assert all(420 < first.count(value) < 580 for value in range(4))


def test_unshuffled_order():
    sampler = PromptSampler(3, seed=9, shuffle=False)
    assert indices(sampler, 7) == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize(
    ("size", "seed", "shuffle", "named"),
    [(11, 3, True, r"size 10 \(now 11\)"), (10, 4, True, r"seed 3 \(now 4\)"), (10, 3, False, r"shuffle 1 \(now 0\)")],
)
def test_state_of_another_run_is_refused(size, seed, shuffle, named):
    state = PromptSampler(10, seed=3).state_dict()
    with pytest.raises(ValueError, match=named):
        PromptSampler(size, seed=seed, shuffle=shuffle).load_state_dict(state)


def test_broken_state_and_empty_dataset_are_refused():
    with pytest.raises(ValueError, match="entries"):
        PromptSampler(10, seed=3).load_state_dict({"drawn": 3})
    with pytest.raises(ValueError, match="0 prompts"):
        PromptSampler(0, seed=3)
