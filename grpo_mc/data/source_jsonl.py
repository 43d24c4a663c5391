"""JSON Lines files: one object a line, UTF-8; blank lines are skipped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from grpo_mc.data.sources import Record
from grpo_mc.data.strict_json import parse_json


def read_jsonl(path: str) -> Iterator[Record]:
    """The records of a file, in order.

    Raises:
        ValueError: no such file, or a line that is not UTF-8, not JSON or not an object; names file and line.
    """
    if not Path(path).is_file():
        problem = "is a folder or no plain file" if Path(path).exists() else "there is no such file"
        raise ValueError(f"{path}: {problem}; give the path of a JSON Lines file")
    with open(path, "rb") as file:
        yield from read_lines(file, path)


def read_lines(lines: Iterable[bytes], name: str) -> Iterator[Record]:
    """The records of JSON lines, in order.

    Args:
        name: What messages call the lines' place, a path mostly.

    Raises:
        ValueError: A line that is not UTF-8, not JSON or not an object; names place and line.
    """
    row = 0
    for number, raw in enumerate(lines, 1):
        where = f"{name} line {number}"
        try:
            line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{where}: byte {error.start} is not UTF-8; save the file as UTF-8") from error
        if not line.strip():
            continue
        try:
            fields = parse_json(line)
        except ValueError as error:
            raise ValueError(f"{where}: not valid JSON ({error}): {_short(line)}; give one object a line") from error
        if not isinstance(fields, dict):
            raise ValueError(f"{where}: holds {_short(line)}, a JSON object with named fields is needed")
        yield Record(fields, row, where)
        row += 1


def _short(line: str) -> str:
    line = line.strip()
    return line if len(line) <= 80 else line[:77] + "..."
