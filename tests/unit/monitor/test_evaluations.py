"""The main figure of an evaluation, and its text."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_mc.monitor.evaluations import evaluation_text


@pytest.mark.parametrize(
    ("record", "text"),
    [
        # 0 of 16: the standard error is 0, the Wilson interval is not.
        ({"accuracy": 0.0, "accuracy_error": 0.0294118, "stderr": 0.0, "n": 16}, "accuracy 0 +- 0.0294 (n = 16)"),
        ({"accuracy": 0.6125, "stderr": 0.024365, "n": 400}, "accuracy 0.613 +- 0.0244 (n = 400)"),
        ({"accuracy": 0.5}, "accuracy 0.5"),
        ({"reward_mean": 0.5, "reward_stderr": 0.1, "n": 4}, "reward_mean 0.5 +- 0.1 (n = 4)"),
        ({"score": 1}, "{'score': 1}"),
    ],
)
def test_the_main_figure_with_its_error(record: dict[str, Any], text: str) -> None:
    assert evaluation_text(record) == text
