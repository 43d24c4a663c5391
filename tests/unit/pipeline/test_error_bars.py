"""Wilson's interval, against numbers worked by hand."""

from __future__ import annotations

import math

import pytest

from grpo_mc.pipeline.error_bars import accuracy_error, wilson_half_width


@pytest.mark.parametrize(
    ("proportion", "n", "z", "half_width"),
    [
        (0.0, 16, 1.0, 0.5 / 17),  # 1/17 * sqrt(1/4)
        (1.0, 16, 1.0, 0.5 / 17),
        (0.5, 3, 1.0, 0.25),  # 1/4 * sqrt(3/4 + 1/4)
        (0.5, 12, 2.0, 0.25),  # 2/16 * sqrt(3 + 1)
        (0.0, 0, 1.0, 0.5),  # nothing known: [0, 1]
        (0.4, 10_000, 1.0, 0.004899),  # where the standard error, sqrt(0.24 / 10000), is good
    ],
)
def test_half_widths(proportion: float, n: float, z: float, half_width: float) -> None:
    assert wilson_half_width(proportion, n, z) == pytest.approx(half_width, rel=1e-4)


def test_the_published_interval_of_10_in_20() -> None:
    """0.2993 to 0.7007 at 95 %."""
    assert wilson_half_width(0.5, 20, 1.96) == pytest.approx((0.7007 - 0.2993) / 2, abs=1e-4)


def test_none_right_is_not_known_exactly() -> None:
    """0 of 16 was shown as 0 +- 0."""
    assert accuracy_error(0.0, 0.0, num_prompts=16, num_samples=1) == pytest.approx(0.0294118, rel=1e-5)
    assert accuracy_error(0.0, 0.0, num_prompts=16, num_samples=8) == pytest.approx(0.0294118, rel=1e-5)


def test_samples_of_one_prompt_count_as_far_as_they_differ() -> None:
    """p = 0.5 and a standard error of 0.1 are those of 25 independent answers."""
    found = accuracy_error(0.5, 0.1, num_prompts=20, num_samples=4)
    assert found == pytest.approx(wilson_half_width(0.5, 25), rel=1e-12)
    few = accuracy_error(0.5, 1e-6, num_prompts=20, num_samples=4)
    assert few == pytest.approx(wilson_half_width(0.5, 80), rel=1e-12), "never more than there are"


def test_an_accuracy_that_is_no_number_stays_one() -> None:
    assert math.isnan(accuracy_error(math.nan, math.nan, num_prompts=4, num_samples=2))
