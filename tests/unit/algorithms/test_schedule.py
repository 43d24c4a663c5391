"""Learning-rate schedules at their corners."""

from __future__ import annotations

import pytest

from grpo_mc.algorithms import learning_rate
from grpo_mc.config import OptimizerConfig


def rates(total_steps: int, **fields: object) -> list[float]:
    optimizer = OptimizerConfig(**{"lr": 1.0, **fields})  # type: ignore[arg-type]
    return [learning_rate(step, optimizer, total_steps) for step in range(total_steps)]


def test_constant_with_warmup_never_starts_at_zero() -> None:
    assert rates(4, warmup_steps=2) == [0.5, 1.0, 1.0, 1.0]


def test_linear_ends_at_min_lr_on_the_last_step() -> None:
    assert rates(5, schedule="linear", min_lr=0.2) == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])


def test_cosine_is_half_way_in_the_middle() -> None:
    assert rates(7, schedule="cosine", min_lr=0.1, warmup_steps=2) == pytest.approx(
        [0.5, 1.0, 1.0, 0.1 + 0.9 * (1 + 2**-0.5) / 2, 0.55, 0.1 + 0.9 * (1 - 2**-0.5) / 2, 0.1]
    )


def test_steps_beyond_the_end_keep_min_lr() -> None:
    assert learning_rate(99, OptimizerConfig(lr=1.0, schedule="cosine", min_lr=0.1), 10) == pytest.approx(0.1)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_a_run_of_one_step_trains_at_the_full_rate(schedule: str) -> None:
    assert rates(1, schedule=schedule) == [1.0]
    assert rates(3, schedule=schedule, warmup_steps=2)[2] == 1.0


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_warmup_longer_than_the_run(schedule: str) -> None:
    assert rates(2, schedule=schedule, warmup_steps=4) == [0.25, 0.5]


def test_negative_step_is_refused() -> None:
    with pytest.raises(ValueError, match="step is -1"):
        learning_rate(-1, OptimizerConfig(), 3)
