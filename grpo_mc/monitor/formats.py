"""Numbers as a person reads them: durations, figures, measurements with their error, counted things. ASCII only."""

from __future__ import annotations

import math


def format_duration(seconds: float | None) -> str:
    """ "45s", "12m05s", "3h07m", "2d04h"; "-" for None or a value that is not finite."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    total = max(0, round(seconds))
    if total < 60:
        return f"{total}s"
    if total < 3600:
        return f"{total // 60}m{total % 60:02d}s"
    if total < 86400:
        return f"{total // 3600}h{total % 3600 // 60:02d}m"
    return f"{total // 86400}d{total % 86400 // 3600:02d}h"


def format_number(value: float | None) -> str:
    """Four significant digits, thousands grouped; "-" for None, "nan" and "inf" as they are."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(value)
    if value == 0 or 1e-3 <= abs(value) < 1000:
        return f"{value:.4g}"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.3g}"


def format_measured(value: float, error: float | None) -> str:
    """A measurement with three significant digits and its error, "0.405 +- 0.0245"; without one where it is None or 0
    (nothing varied, which measures no error)."""
    return f"{value:.3g} +- {error:.3g}" if error else f"{value:.3g}"


def counted(count: int, noun: str) -> str:
    """ "1 step", "2 steps", "0 steps": for nouns that take an s."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
