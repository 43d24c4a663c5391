"""Numbers as text."""

from __future__ import annotations

import math

import pytest

from grpo_mc.monitor.formats import counted, format_duration, format_measured, format_number


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (59.4, "59s"), (59.6, "1m00s"), (725, "12m05s"), (11220, "3h07m"), (187200, "2d04h"),
     (-3, "0s"), (None, "-"), (math.nan, "-"), (math.inf, "-")],
)  # fmt: skip
def test_durations(seconds: float | None, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.123456, "0.1235"), (999.9, "999.9"), (12345.6, "12,346"), (1.5e-5, "1.5e-05"), (3e12, "3e+12"),
     (math.nan, "nan"), (-math.inf, "-inf"), (None, "-")],
)  # fmt: skip
def test_numbers(value: float | None, text: str) -> None:
    assert format_number(value) == text


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [(0.405, 0.024515, "0.405 +- 0.0245"), (0.0, 0.0294118, "0 +- 0.0294"), (0.61249, None, "0.612"),
     (1.0, 0.5, "1 +- 0.5"), (0.25, 0.0, "0.25"), (math.nan, math.nan, "nan +- nan")],
)  # fmt: skip
def test_measurements_have_three_digits_and_one_notation(value: float, error: float | None, text: str) -> None:
    assert format_measured(value, error) == text


@pytest.mark.parametrize(("count", "text"), [(0, "0 steps"), (1, "1 step"), (2, "2 steps")])
def test_one_is_singular(count: int, text: str) -> None:
    assert counted(count, "step") == text
