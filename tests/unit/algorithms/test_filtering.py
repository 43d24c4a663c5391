"""Filtering and the account of refills."""

from __future__ import annotations

from grpo_mc.algorithms import FilterDecision, RefillState
from grpo_mc.config import AlgorithmConfig


def test_refills_ask_for_what_is_missing_and_stop_when_full() -> None:
    state = RefillState.start(4, AlgorithmConfig(filter_zero_variance=True, max_refills=3))
    assert state.next_round() == 4
    state = state.after_round(FilterDecision(kept=(1,), filtered=(0, 2), dropped=(3,)))
    assert state.next_round() == 3
    state = state.after_round(FilterDecision(kept=(0, 1, 2), filtered=(), dropped=()))
    assert state.next_round() == 0
    assert state.counters() == {
        "filter/rounds": 2,
        "filter/sampled_groups": 7,
        "filter/kept_groups": 4,
        "filter/filtered_groups": 2,
        "filter/dropped_groups": 1,
        "filter/missing_groups": 0,
    }


def test_refills_are_bounded_when_every_group_is_constant() -> None:
    """H01: a task that is solved, or hopeless, must not sample for ever."""
    state, rounds = RefillState.start(2, AlgorithmConfig(filter_zero_variance=True, max_refills=2)), 0
    while state.next_round():
        state = state.after_round(FilterDecision(kept=(), filtered=(0, 1), dropped=()))
        rounds += 1
    assert rounds == 3  # the first and two refills
    assert state.missing == 2 and state.counters()["filter/missing_groups"] == 2


def test_no_refills_by_default() -> None:
    state = RefillState.start(2, AlgorithmConfig(filter_zero_variance=True))
    assert state.after_round(FilterDecision(kept=(), filtered=(0, 1), dropped=())).next_round() == 0
