"""The durable log of a run's rollouts: RUN_DIR/rollouts/step_00000012.parquet, one row per rollout.

A file appears whole or not at all: it is written beside its name, put on the disk and renamed. Token ids, log-probs and
rewards come back bit for bit, so that a training step can be replayed from it (pipeline.mode train_only). The files are
plain Parquet with column statistics, for whoever queries them, e.g. with duckdb:

    SELECT step, avg(reward), avg(response_length) FROM 'runs/first/rollouts/*.parquet' GROUP BY step ORDER BY step;
    COPY (SELECT * FROM 'runs/first/rollouts/*.parquet' WHERE data_source = 'chain_sum') TO 'sums.parquet';

`read_rollouts` takes the result of the second query too: what it needs is in the columns (pipeline.rollout_table).
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from grpo_mc.data.records import Group
from grpo_mc.pipeline.rollout_table import NULLABLE, SCHEMA, rollouts_of, to_table

ROLLOUTS_DIR = "rollouts"
_FILE = re.compile(r"step_(\d+)\.parquet")
_STEP_KEY = b"grpo_mc.step"
"""Metadata of a file; tells the step where there is no row to tell it."""


class RolloutLog:
    """The rollouts folder of one run; one process writes it."""

    def __init__(self, run_dir: str | Path) -> None:
        self.folder = Path(run_dir) / ROLLOUTS_DIR

    def write(self, step: int, groups: Sequence[Group]) -> Path:
        """Writes the rollouts of a step, in place of any that are there under this step.

        Args:
            step: the optimizer step that the rollouts are for.
            groups: may be empty.

        Returns:
            The file.

        Raises:
            OSError: it cannot be written, e.g. the disk is full; no file is left, and an older one of this step stays.
        """
        path = self.folder / f"step_{step:08d}.parquet"
        partial = path.with_name(f".{path.name}.partial")
        table = to_table(step, groups).replace_schema_metadata({_STEP_KEY: str(step).encode()})
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                with partial.open("wb") as file:
                    pq.write_table(table, file, compression="zstd")
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(partial, path)
            finally:
                partial.unlink(missing_ok=True)
            _sync_folder(self.folder)
        except OSError as error:
            raise OSError(
                error.errno,
                f"write rollouts: {path} cannot be written ({error.strerror or error}); free some space there or set "
                "run.dir to a folder that can be written",
            ) from error
        return path

    def num_steps(self) -> int:
        """Recorded steps."""
        return len(self._files())

    def truncate_after(self, step: int) -> int:
        """Removes the files of steps later than `step`, which a resumed run will do again; returns how many."""
        later = [path for number, path in self._files() if number > step]
        for path in later:
            path.unlink()
        for leftover in self.folder.glob(".step_*.parquet.partial"):  # of a run that was killed
            leftover.unlink()
        if later:
            _sync_folder(self.folder)
        return len(later)

    def _files(self) -> list[tuple[int, Path]]:
        names = ((_FILE.fullmatch(path.name), path) for path in self.folder.glob("step_*.parquet"))
        return sorted((int(match[1]), path) for match, path in names if match)


def read_rollouts(path: str | Path) -> list[tuple[int, list[Group]]]:
    """The rollouts of a run.

    Args:
        path: a file of the log, a folder of them, or a run directory.

    Returns:
        (step, groups) by rising step; groups and their rollouts in the order of the rows. The rollouts of a group share
        one Prompt. Prompt.fields holds what JSON keeps of it.

    Raises:
        ValueError: nothing there, or a file that is damaged or holds no such log; names the file.
    """
    steps: dict[int, dict[int, Group]] = {}
    seen: set[tuple[int, int, int]] = set()
    for file in _find_files(Path(path)):
        step, table = _read_table(file)
        if step is not None:
            steps.setdefault(step, {})
        try:
            rows = list(rollouts_of(table))
        except (ValueError, TypeError, AttributeError) as error:  # values of another kind than the log's
            raise ValueError(
                f"read rollouts: {file} has a row that is no rollout ({error}); write it with RolloutLog or select "
                "whole rows of its files"
            ) from error
        for row_step, rollout in rows:
            key = (row_step, rollout.group_id, rollout.sample_index)
            if key in seen:
                raise ValueError(
                    f"read rollouts: {file} holds step {key[0]}, group {key[1]}, sample {key[2]} a second time; "
                    "remove the file that repeats it"
                )
            seen.add(key)
            groups = steps.setdefault(row_step, {})
            group = groups.setdefault(rollout.group_id, Group(rollout.group_id, rollout.prompt, []))
            rollout.prompt = group.prompt
            group.rollouts.append(rollout)
    return [(step, list(groups.values())) for step, groups in sorted(steps.items())]


def _find_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    folder = path / ROLLOUTS_DIR if (path / ROLLOUTS_DIR).is_dir() else path
    files = sorted(file for file in folder.glob("*.parquet") if not file.name.startswith("."))
    if not files:
        what = "holds no .parquet file" if folder.is_dir() else "does not exist"
        raise ValueError(
            f"read rollouts: {folder} {what}; give a run directory, its {ROLLOUTS_DIR} folder or a file of it"
        )
    return files


def _read_table(file: Path) -> tuple[int | None, pa.Table]:
    """(the step in the file's metadata if any, its rows in the log's schema)."""
    try:
        with pq.ParquetFile(file) as parquet:
            names = parquet.schema_arrow.names
            missing = [name for name in SCHEMA.names if name not in names]
            if missing:
                raise ValueError(
                    f"read rollouts: {file} lacks the columns {', '.join(missing)}; give a file that RolloutLog "
                    "wrote, or select all its columns"
                )
            step = (parquet.schema_arrow.metadata or {}).get(_STEP_KEY)
            table = parquet.read(columns=SCHEMA.names).select(SCHEMA.names).cast(SCHEMA)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(
            f"read rollouts: {file} is damaged or no log of rollouts ({error}); remove it or write it again"
        ) from error
    for name in SCHEMA.names:
        if name not in NULLABLE and table.column(name).null_count:
            raise ValueError(f"read rollouts: {file} has rows without {name}; select whole rows of the log")
    return (int(step) if step is not None and step.isdigit() else None), table


def _sync_folder(folder: Path) -> None:
    """Onto the disk, so that the rename or removal is not lost in a crash."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
