"""Line files: strict JSON, torn lines, truncation on resume, atomic writes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from grpo_mc.monitor import run_files


def test_values_that_are_not_finite_are_strict_json_and_come_back() -> None:
    line = run_files.to_line({"step": 1, "a": math.nan, "b": math.inf, "c": -math.inf, "d": [math.nan, 1.5]})

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    record = json.loads(line, parse_constant=refuse)
    assert record == {"step": 1, "a": "NaN", "b": "Infinity", "c": "-Infinity", "d": ["NaN", 1.5]}
    assert math.isnan(run_files.decode_number(record["a"]))  # type: ignore[arg-type]
    assert run_files.decode_number(record["b"]) == math.inf
    assert run_files.decode_number(record["c"]) == -math.inf


@pytest.mark.parametrize("value", [None, "0.5", "nan", True, [1], {"a": 1}])
def test_what_is_no_number_decodes_to_none(value: object) -> None:
    assert run_files.decode_number(value) is None


def test_text_that_utf8_cannot_hold_is_written_all_the_same() -> None:
    line = run_files.to_line({"response": "a\ud800b \u00e9 \U0001f600\n\u2028"})
    assert line.count("\n") == 1
    assert json.loads(line)["response"] == "a?b \u00e9 \U0001f600\n\u2028"


def test_a_torn_last_line_is_skipped_and_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n[2]\n\n{"step": 3, "rew', encoding="utf-8")
    result = run_files.read_line_file(path)
    assert result.records == [{"step": 1}]
    assert result.problems == [
        "metrics.jsonl, line 2: not an object; left out",
        "metrics.jsonl, line 4: not complete JSON (16 bytes); left out",
    ]


def test_a_line_torn_inside_a_character_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_bytes(b'{"step": 1}\n{"response": "' + "\u00e9".encode()[:1])
    result = run_files.read_line_file(path)
    assert [len(result.records), len(result.problems)] == [1, 1]


def test_a_missing_file_is_an_empty_one(tmp_path: Path) -> None:
    assert run_files.read_line_file(tmp_path / "none.jsonl") == run_files.LineFile()
    assert run_files.truncate_after(tmp_path / "none.jsonl", 3) == 0


@pytest.mark.parametrize("size", [0, 1, 5, 11, 12, 13, 23])
def test_appending_after_a_kill_at_any_byte_leaves_whole_lines(tmp_path: Path, size: int) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n'[:size])
    with run_files.open_for_append(path) as handle:
        handle.write('{"step": 9}\n')
    result = run_files.read_line_file(path)
    assert result.problems == []
    assert [r["step"] for r in result.records] == [1, 2][: size // 12] + [9]


def test_truncation_keeps_steps_up_to_the_resumed_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"x": 1}\n{"step": 4', encoding="utf-8")
    assert run_files.truncate_after(path, 2) == 3
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'
    assert run_files.truncate_after(path, 0) == 2
    assert path.read_text() == ""
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_truncation_mends_a_missing_line_end(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}', encoding="utf-8")
    assert run_files.truncate_after(path, 5) == 0
    assert path.read_text() == '{"step": 1}\n'


def test_a_failed_write_leaves_the_old_file_and_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.html"
    path.write_text("old", encoding="utf-8")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_files.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        run_files.write_atomically(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]


def test_the_last_record_of_a_step_counts() -> None:
    records = [{"step": 2, "a": 1}, {"step": 1, "a": 2}, {"step": 2, "a": 3}, {"a": 4}, {"step": True}, {"step": "3"}]
    assert run_files.latest_by_step(records) == [{"step": 1, "a": 2}, {"step": 2, "a": 3}]
