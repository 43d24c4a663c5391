"""Judging a file of responses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_mc.rewards import score_file
from helpers.rewards import rewards_config

EXACT = rewards_config({"type": "exact"})


def _write(path: Path, *lines: Any) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_lines_are_scored_in_order_with_their_numbers(tmp_path: Path) -> None:
    path = _write(
        tmp_path / "r.jsonl",
        {"response": "4", "answer": 4},
        "",
        {"response": "5", "ground_truth": "4", "prompt": [{"role": "user", "content": "2+2"}]},
        {"response": "4", "reward_model": {"ground_truth": "4"}, "data_source": "gsm8k"},
        {"response": "4"},
    )
    scored = list(score_file(path, EXACT))
    assert [(s.line, s.reward) for s in scored] == [(1, 1.0), (3, 0.0), (4, 1.0), (5, None)]
    assert scored[3].to_json()["verdicts"][0]["status"] == "abstained"
    json.dumps([s.to_json() for s in scored])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"response": ', "line 2: not JSON"),
        ("[1]", "line 2: is a JSON list"),
        ('{"response": 4}', "line 2: field 'response' is 4"),
        ('{"answer": "4"}', "line 2: field 'response' is None"),
        ('{"response": "4", "prompt": 3}', "line 2: field 'prompt'"),
    ],
)
def test_a_bad_line_is_named_with_its_field(tmp_path: Path, line: str, message: str) -> None:
    path = _write(tmp_path / "r.jsonl", {"response": "4"}, line)
    with pytest.raises(ValueError, match="r.jsonl") as error:
        list(score_file(path, EXACT))
    assert message in str(error.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no file.*none.jsonl"):
        list(score_file(tmp_path / "none.jsonl", EXACT))
