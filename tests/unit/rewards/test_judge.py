"""Raw values become typed verdicts; only finite numbers are scores."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from grpo_mc.data.records import FinishReason, Rollout, Verdict, VerdictStatus
from grpo_mc.rewards import NamedScorer, Sample, score_one
from grpo_mc.rewards.judge import classify, one_line, record_verdicts, run_scorer
from grpo_mc.rewards.sample import PromptView
from helpers.rewards import make_group, make_prompt

SAMPLE = Sample(PromptView("p"), "r")


@pytest.mark.parametrize(
    ("value", "score"), [(1, 1.0), (0.5, 0.5), (-3, -3.0), (np.float32(0.25), 0.25), (np.int64(2), 2.0)]
)
def test_finite_numbers_are_scores(value: object, score: float) -> None:
    assert classify(value) == (VerdictStatus.SCORED, score, "")


@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, -math.inf, np.float32("nan"), True, np.bool_(True), "1", b"1", [1.0], {}, 1j, 10**400, 1e39],
)
def test_nan_inf_strings_and_bools_are_bad_output(value: object) -> None:
    """H03: none of these becomes a score, and none becomes 0. 1e39 would be infinite in float32."""
    status, score, reason = classify(value)
    assert status is VerdictStatus.BAD_OUTPUT
    assert score is None
    assert reason.startswith("returned")


def test_none_abstains() -> None:
    """H03: None is no score and no zero."""
    status, score, _ = classify(None)
    assert (status, score) == (VerdictStatus.ABSTAINED, None)


@pytest.mark.parametrize("error", [ValueError("bad\nthing"), SystemExit(3), RecursionError("deep"), MemoryError()])
def test_what_a_function_raises_is_a_crash(error: BaseException) -> None:
    def score(sample: Sample) -> tuple[object, str]:
        raise error

    verdict = run_scorer(NamedScorer("f", score), SAMPLE)
    assert verdict.status is VerdictStatus.CRASHED
    assert verdict.reason.startswith(type(error).__name__)
    assert "test_judge.py" in verdict.reason
    assert "\n" not in verdict.reason


def test_score_one_takes_a_rollout() -> None:
    rollout = make_group(["ab"], "x").rollouts[0]
    seen: list[Sample] = []

    def score(sample: Sample) -> tuple[object, str]:
        seen.append(sample)
        return len(sample.text), "length"

    (verdict,) = score_one([NamedScorer("length", score)], rollout)
    assert (verdict.name, verdict.score, verdict.reason) == ("length", 2.0, "length")
    assert seen[0].prompt.ground_truth == "x"
    assert seen[0].response_ids == (0, 7)


def _recorded(*verdicts: Verdict, **weights: float) -> Rollout:
    rollout = Rollout(0, 0, make_prompt(), [], "", FinishReason.FINISHED, (0,))
    record_verdicts(rollout, verdicts, weights)
    return rollout


def test_unscored_functions_are_left_out_of_the_sum() -> None:
    """H03: a function that gave no score neither adds 0 nor makes the sum NaN."""
    scored = Verdict("a", VerdictStatus.SCORED, 0.5)
    rollout = _recorded(scored, Verdict("b", VerdictStatus.TIMED_OUT), a=2.0, b=10.0)
    assert rollout.reward == 1.0
    assert rollout.rewards == {"a": 0.5}
    assert len(rollout.verdicts) == 2


def test_a_rollout_without_any_score_is_unscored() -> None:
    rollout = _recorded(Verdict("a", VerdictStatus.ABSTAINED), Verdict("b", VerdictStatus.BAD_OUTPUT), a=1.0, b=1.0)
    assert rollout.reward is None
    assert rollout.rewards == {}


def test_a_sum_beyond_float32_is_unscored() -> None:
    assert _recorded(Verdict("a", VerdictStatus.SCORED, 3e38), a=2.0).reward is None


def test_reasons_are_one_short_line_of_valid_text() -> None:
    reason: Any = one_line("a\n\tb \ud800 " + "x" * 1000)
    assert reason.startswith("a b ?")
    assert len(reason) == 500
    reason.encode("utf-8")
