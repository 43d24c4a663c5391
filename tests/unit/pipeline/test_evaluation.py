"""Evaluations: the figures, and what is told on the way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from grpo_mc.config import EvaluationConfig, RolloutConfig
from grpo_mc.data.records import FinishReason, Group, Prompt, Rollout, Segment, Verdict, VerdictStatus
from grpo_mc.pipeline.evaluation import HeldOut, summarise


def make_group(at: int, scores: list[float]) -> Group:
    prompt = Prompt(f"held-out:{at}", np.arange(2), "1 + 1 =")
    rollouts = [
        Rollout(
            group_id=at, sample_index=i, prompt=prompt,
            segments=[Segment("model", np.arange(3), np.zeros(3, np.float32))],
            text="2", finish_reason=FinishReason.FINISHED, policy_versions=(0,), rewards={"exact": score},
            verdicts=[Verdict("exact", VerdictStatus.SCORED, score, "")], reward=score,
        )
        for i, score in enumerate(scores)
    ]  # fmt: skip
    return Group(at, prompt, rollouts)


def test_all_wrong_has_an_error_bar() -> None:
    result = summarise([make_group(at, [0.0]) for at in range(16)], "exact", [1])
    assert (result.accuracy, result.stderr) == (0.0, 0.0)
    assert result.accuracy_error == pytest.approx(0.5 / 17, rel=1e-12)
    assert result.record()["accuracy_error"] == result.accuracy_error


def test_several_samples_a_prompt() -> None:
    """Means 1, 0, 1, 0: p = 0.5, the standard error is sqrt(1/3 / 4), as of 0.25 / (1/12) = 3 independent answers."""
    result = summarise([make_group(at, [float(at % 2)] * 2) for at in range(4)], "exact", [1, 2])
    assert result.stderr == pytest.approx((1 / 12) ** 0.5)
    assert result.accuracy_error == pytest.approx(0.25)
    assert result.pass_at == {1: 0.5, 2: 0.5}


@pytest.mark.parametrize(("dp", "expected"), [(1, [(0, 6), (2, 6), (3, 6)]), (2, [(0, 6), (4, 6), (6, 6)])])
def test_progress_is_told_in_responses_of_all_ranks(dp: int, expected: list[tuple[int, int]]) -> None:
    """A rank knows its own share only and takes the others' as the same."""

    def run(draws: Any, params: Any, *, num_samples: int, policy_version: int, on_ended: Any) -> list[Group]:
        on_ended(2)
        on_ended(3)
        return [make_group(0, [1.0, 0.0])]

    told: list[tuple[int, int]] = []
    held_out = HeldOut(
        [None] * 3, EvaluationConfig(num_samples=2), RolloutConfig(group_size=2, max_new_tokens=4),  # type: ignore[arg-type]
        rollout=SimpleNamespace(run=run, mesh=SimpleNamespace(dp=dp)),  # type: ignore[arg-type]
        rewards=SimpleNamespace(run=lambda groups: groups),  # type: ignore[arg-type]
        on_progress=lambda done, total: told.append((done, total)),
    )  # fmt: skip
    held_out.measure(policy_version=0)
    assert told == expected
