"""Judging a file of responses."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from grpo_mc.rewards.files import read_responses, score_responses
from helpers.rewards import rewards_config


def _write(path: Path, *lines: Any) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_responses_are_scored_with_the_answers_of_every_schema(tmp_path: Path) -> None:
    path = _write(
        tmp_path / "r.jsonl",
        {"response": "4", "answer": 4},
        "",
        {"response": "5", "ground_truth": "4", "prompt": [{"role": "user", "content": "2+2"}]},
        {"response": "4", "reward_model": {"ground_truth": "4"}, "data_source": "gsm8k"},
        {"response": "4"},
    )
    groups = read_responses(path)
    score_responses(groups, rewards_config({"type": "exact"}))
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert [rollout.reward for rollout in rollouts] == [1.0, 0.0, 1.0, None]
    assert str(rollouts[3].verdicts[0].status) == "abstained"
    assert rollouts[1].prompt.messages == ({"role": "user", "content": "2+2"},)
    assert (rollouts[1].prompt.text, rollouts[2].prompt.data_source) == ("2+2", "gsm8k")


def test_consecutive_lines_with_one_prompt_are_a_group(tmp_path: Path) -> None:
    path = _write(
        tmp_path / "r.jsonl",
        {"prompt": "p", "response": "a", "ground_truth": 2, "level": 3},
        "",
        {"prompt": "p", "response": "b", "ground_truth": 2, "level": 4},
        {"prompt": "p", "response": "b", "ground_truth": 3},
        {"prompt": "q", "response": "c", "data_source": "sums"},
        {"response": "d"},
    )
    groups = read_responses(path)
    assert [[r.text for r in g.rollouts] for g in groups] == [["a", "b"], ["b"], ["c"], ["d"]]
    assert [g.prompt.ground_truth for g in groups] == ["2", "3", None, None]
    assert [(r.group_id, r.sample_index) for g in groups for r in g.rollouts] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (2, 0),
        (3, 0),
    ]
    assert groups[0].rollouts[0].prompt.fields == {"ground_truth": 2, "level": 3}


def test_each_response_of_a_group_is_judged_with_its_own_columns(tmp_path: Path) -> None:
    function = tmp_path / "level.py"
    function.write_text("def level(completions, level, **_):\n    return level\n")
    path = _write(
        tmp_path / "r.jsonl", {"prompt": "p", "response": "a", "level": 3}, {"prompt": "p", "response": "b", "level": 4}
    )
    groups = read_responses(path)
    score_responses(groups, rewards_config({"type": "function", "path": f"{function}:level"}))
    assert [rollout.reward for rollout in groups[0].rollouts] == [3.0, 4.0]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"response": ', "line 2: not valid JSON"),
        ("[1]", "line 2: holds [1], a JSON object with named fields is needed"),
        ('{"response": 4}', "line 2: field 'response' is 4; a text is needed"),
        ('{"answer": "4"}', "line 2: field 'response' is missing"),
        ('{"response": "4", "prompt": 3}', "line 2: field 'prompt' is 3"),
        ('{"response": "4", "prompt": [{"role": "user"}]}', "line 2: field 'prompt'"),
    ],
)
def test_a_bad_line_is_named_with_its_field(tmp_path: Path, line: str, message: str) -> None:
    path = _write(tmp_path / "r.jsonl", {"response": "4"}, line)
    with pytest.raises(ValueError, match="r.jsonl") as error:
        read_responses(path)
    assert message in str(error.value)


def test_a_file_that_is_missing_or_empty_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="none.jsonl: there is no such file"):
        read_responses(tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match="r.jsonl: holds no response"):
        read_responses(_write(tmp_path / "r.jsonl", ""))


def test_responses_can_come_from_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = b'{"response": "4", "ground_truth": "4"}\n\n{"response": 5}\n'
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(lines[:40])))
    assert [rollout.text for group in read_responses("-") for rollout in group.rollouts] == ["4"]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(lines)))
    with pytest.raises(ValueError, match="standard input line 3: field 'response' is 5"):
        read_responses("-")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"")))
    with pytest.raises(ValueError, match="standard input: holds no response"):
        read_responses("-")
