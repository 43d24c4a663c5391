"""The line files of a run directory: one strict JSON object a line, safe to kill at any byte.

    config.yaml         the resolved configuration
    metrics.jsonl       {"step": 3, "reward/mean": 0.5, ...}                      one object a step
    evaluations.jsonl   {"step": 0, "accuracy": 0.31, "stderr": 0.02, "n": 400}   one object an evaluation
    samples.jsonl       {"step": 3, "prompt": ..., "response": ..., "reward": ...}
    checkpoints/step_N/, rollouts/step_N.parquet, report.html, and run.lock (see run_lock.py)

JSON has no NaN: the values NaN, +inf and -inf are written as the strings "NaN", "Infinity" and "-Infinity" (the
mapping of protobuf's JSON form), so that every line parses everywhere and no value is lost; `decode_number` reads
them back. A kill during a write leaves at most one torn last line; readers skip it and say so, and `truncate_after`
removes it.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from grpo_mc.data.strict_json import parse_json

CONFIG_FILE = "config.yaml"
METRICS_FILE = "metrics.jsonl"
EVALUATIONS_FILE = "evaluations.jsonl"
SAMPLES_FILE = "samples.jsonl"
REPORT_FILE = "report.html"
CHECKPOINTS_DIR = "checkpoints"
ROLLOUTS_DIR = "rollouts"
LOCK_FILE = "run.lock"


def encode_number(value: float) -> float | int | str:
    """A JSON value for a number: itself when finite, otherwise "NaN", "Infinity" or "-Infinity"."""
    if isinstance(value, int):
        return value
    if math.isfinite(value):
        return value
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def decode_number(value: Any) -> float | None:
    """The number behind a value of a line file; None when it is no number (missing, text, a list, a boolean)."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value)
    if value in ("NaN", "Infinity", "-Infinity"):
        return float(value)
    return None


def encode_value(value: Any) -> Any:
    """`value` with every float inside made strict JSON, recursively; tuples become lists."""
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    if isinstance(value, dict):
        return {str(key): encode_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode_value(item) for item in value]
    if isinstance(value, int | float):
        return encode_number(value)
    return encode_number(float(value))


def to_line(record: dict[str, Any]) -> str:
    """One line of a line file, newline included. Text is kept readable (not escaped to ASCII); a lone surrogate,
    which UTF-8 cannot hold, is replaced."""
    text = json.dumps(encode_value(record), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "replace").decode("utf-8") + "\n"


def open_for_append(path: Path) -> TextIO:
    """Opens a line file for appending, after removing a torn last line (one without its newline)."""
    if path.exists() and path.stat().st_size > 0:
        with path.open("rb+") as handle:
            size = handle.seek(0, os.SEEK_END)
            handle.seek(size - 1)
            if handle.read(1) != b"\n":
                handle.seek(0)
                handle.truncate(handle.read().rfind(b"\n") + 1)
    return path.open("a", encoding="utf-8", newline="\n")


@dataclass
class LineFile:
    """What a line file held."""

    records: list[dict[str, Any]] = field(default_factory=list)
    """The objects that parse, in file order."""
    problems: list[str] = field(default_factory=list)
    """One sentence for each line left out: file, line number, why."""


def read_line_file(path: Path) -> LineFile:
    """Reads a line file of a run that may still be going or was killed. A missing file is an empty one."""
    result = LineFile()
    if not path.exists():
        return result
    raw = path.read_bytes()
    for number, line in enumerate(raw.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            record = parse_json(line.decode("utf-8"))
        except ValueError:
            result.problems.append(f"{path.name}, line {number}: not complete JSON ({len(line)} bytes); left out")
            continue
        if isinstance(record, dict):
            result.records.append(record)
        else:
            result.problems.append(f"{path.name}, line {number}: not an object; left out")
    return result


def record_step(record: dict[str, Any]) -> int | None:
    """The step of a record, or None when it has none."""
    step = record.get("step")
    return step if isinstance(step, int) and not isinstance(step, bool) else None


def truncate_after(path: Path, last_step: int) -> int:
    """Keeps the lines whose step is at most `last_step`; drops later ones, torn ones and ones without a step.

    The file is replaced atomically: a kill leaves the old or the new one. Returns the number of lines dropped.
    """
    if not path.exists():
        return 0
    lines = [line for line in path.read_bytes().split(b"\n") if line.strip()]
    kept = [line for line in lines if _line_step_at_most(line, last_step)]
    if len(kept) < len(lines) or not path.read_bytes().endswith(b"\n"):
        write_atomically(path, "".join(line.decode("utf-8") + "\n" for line in kept))
    return len(lines) - len(kept)


def _line_step_at_most(line: bytes, last_step: int) -> bool:
    try:
        record = parse_json(line.decode("utf-8"))
    except ValueError:
        return False
    step = record_step(record) if isinstance(record, dict) else None
    return step is not None and step <= last_step


def write_atomically(path: Path, text: str) -> None:
    """Writes a UTF-8 text file so that a reader sees the old content or the new one, never a part."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with aside.open("w", encoding="utf-8", newline="\n", errors="replace") as handle:
            handle.write(text)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def latest_by_step(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """One record a step, the last written winning (a run resumed by other means can repeat a step), by step."""
    by_step = {step: record for record in records if (step := record_step(record)) is not None}
    return [by_step[step] for step in sorted(by_step)]


Clock = Callable[[], float]
"""Seconds from an arbitrary start; tests pass their own."""
