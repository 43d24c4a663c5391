"""Reading the records of a prompt source, whatever its kind.

A record is a mapping of field names to plain values together with where it stands, so that every complaint can name
file, row and field. What the fields mean (which is the prompt, which the answer) is `grpo_mc.data.schemas`' matter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from grpo_mc.config.data import HfSource, JsonlSource, ParquetSource, ReasoningGymSource, Source


@dataclass(frozen=True)
class Record:
    """One row of a source."""

    fields: dict[str, Any]
    """Plain Python values by field name."""
    row: int
    """Position in the source, from 0."""
    where: str
    """For messages: "problems.jsonl line 3"."""

    def error(self, field: str, problem: str) -> ValueError:
        """The complaint about one field: its place, its value and what is wrong with it."""
        value = repr(self.fields[field]) if field in self.fields else "missing"
        short = value if len(value) <= 100 else value[:97] + "..."
        return ValueError(f"{self.where}: field {field!r} is {short}; {problem}")


def read_records(source: Source) -> list[Record]:
    """All records of a source, or the first `source.limit`.

    Raises:
        ValueError: the source cannot be read, a row is broken, or there is no row.
    """
    records = list(islice(_iterate(source), source.limit))
    if not records:
        raise ValueError(f"{source_name(source)}: there is no usable row in it; give a source with at least one record")
    return records


def source_name(source: Source) -> str:
    """For messages: the path, or the generator with its seed."""
    if isinstance(source, ReasoningGymSource):
        return f"reasoning_gym {source.task} (seed {source.seed})"
    return source.path


def _iterate(source: Source) -> Iterator[Record]:
    # each kind is imported when it is used: pyarrow and reasoning_gym take seconds to import
    if isinstance(source, ReasoningGymSource):
        from grpo_mc.data.source_reasoning_gym import read_reasoning_gym

        return read_reasoning_gym(source)
    if isinstance(source, JsonlSource):
        from grpo_mc.data.source_jsonl import read_jsonl

        return read_jsonl(source.path)
    if isinstance(source, ParquetSource):
        from grpo_mc.data.source_parquet import read_parquet

        return read_parquet(source.path)
    assert isinstance(source, HfSource), f"unknown source {source!r}"
    from grpo_mc.data.source_hf import read_hf

    return read_hf(source.path)
