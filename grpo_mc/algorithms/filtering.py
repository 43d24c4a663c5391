"""Which groups of a batch are worth training on, and how many to sample again. Pure functions.

A group whose rewards are all equal has advantage 0 everywhere: with `filter_zero_variance` it is taken out and, up to
`max_refills` extra rounds of sampling in a step, replaced (DAPO's dynamic sampling, arXiv 2503.14476, with a bound).
A group with fewer than two valid rollouts can never be trained on and is always taken out. Everything is counted:

    sampled = kept + filtered + dropped, after every round.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from grpo_mc.algorithms.advantages import AdvantageResult
from grpo_mc.config import AlgorithmConfig


@dataclass(frozen=True)
class FilterDecision:
    """Positions of the groups of one round, in order."""

    kept: tuple[int, ...]
    filtered: tuple[int, ...]
    """Equal rewards, and the filter is on."""
    dropped: tuple[int, ...]
    """Fewer than two valid rollouts."""


def filter_groups(result: AdvantageResult, algorithm: AlgorithmConfig) -> FilterDecision:
    """Sorts the groups of one round into kept, filtered and dropped.

    Equal rewards are judged before the KL in the reward (see advantages.py). With the filter off, groups of equal
    rewards are kept.
    """
    dropped = tuple(result.dropped.nonzero().flatten().tolist())
    constant = tuple(result.zero_variance.nonzero().flatten().tolist())
    filtered = constant if algorithm.filter_zero_variance else ()
    out = set(dropped) | set(filtered)
    kept = tuple(group for group in range(len(result.dropped)) if group not in out)
    return FilterDecision(kept, filtered, dropped)


@dataclass(frozen=True)
class RefillState:
    """The account of one step's sampling."""

    wanted: int
    """Groups of a full training batch."""
    max_refills: int
    """Most extra rounds."""
    rounds: int = 0
    """Rounds sampled so far, the first included."""
    sampled: int = 0
    kept: int = 0
    filtered: int = 0
    dropped: int = 0

    @classmethod
    def start(cls, wanted: int, algorithm: AlgorithmConfig) -> RefillState:
        """The account of a step that has sampled nothing yet."""
        return cls(wanted, algorithm.max_refills)

    def after_round(self, decision: FilterDecision) -> RefillState:
        """The account after one more round."""
        kept, filtered, dropped = len(decision.kept), len(decision.filtered), len(decision.dropped)
        return replace(
            self,
            rounds=self.rounds + 1,
            sampled=self.sampled + kept + filtered + dropped,
            kept=self.kept + kept,
            filtered=self.filtered + filtered,
            dropped=self.dropped + dropped,
        )

    @property
    def missing(self) -> int:
        """Groups that the training batch still lacks."""
        return max(self.wanted - self.kept, 0)

    def next_round(self) -> int:
        """Groups to sample now: all wanted at first, then the missing ones, 0 when full or out of rounds.

        A step that stays short trains on the groups it has; the denominators are counted from those.
        """
        return self.missing if self.rounds <= self.max_refills else 0

    def counters(self) -> dict[str, int]:
        """Metrics of the step."""
        return {
            "filter/rounds": self.rounds,
            "filter/sampled_groups": self.sampled,
            "filter/kept_groups": self.kept,
            "filter/filtered_groups": self.filtered,
            "filter/dropped_groups": self.dropped,
            "filter/missing_groups": self.missing,
        }
