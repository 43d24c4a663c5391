"""The main figure of an evaluation, as evaluations.jsonl has it, and its text: everything that shows one uses these."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo_mc.monitor.formats import format_measured
from grpo_mc.monitor.run_files import decode_number

MAIN_FIGURES = (("accuracy", ("accuracy_error", "stderr")), ("reward_mean", ("reward_stderr", "stderr")))
"""Figure -> where its error is, the first that is there: an accuracy's bar is Wilson's (pipeline/error_bars.py)."""


def evaluation_value(record: Mapping[str, Any]) -> tuple[str, float, float | None] | None:
    """(name, value, error or None) of an evaluation's main figure: accuracy, else reward_mean; None without either."""
    for name, errors in MAIN_FIGURES:
        value = decode_number(record.get(name))
        if value is not None:
            found = (decode_number(record.get(error)) for error in errors)
            return name, value, next((error for error in found if error is not None), None)
    return None


def evaluation_text(record: Mapping[str, Any]) -> str:
    """The main figure with its error and the number of problems: "accuracy 0.405 +- 0.0245 (n = 400)"."""
    figure = evaluation_value(record)
    if figure is None:
        return str(dict(record))
    name, value, error = figure
    count = f" (n = {record['n']})" if "n" in record else ""
    return f"{name} {format_measured(value, error)}{count}"
