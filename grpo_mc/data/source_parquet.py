"""Parquet files, one or a folder of them in the order of their names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from grpo_mc.data.sources import Record

_BATCH_ROWS = 1024


def read_parquet(path: str) -> Iterator[Record]:
    """The records of a file or folder, in order.

    Raises:
        ValueError: nothing there, or a file that is not Parquet or is broken; names the file.
    """
    found = Path(path)
    files = sorted(found.glob("*.parquet")) if found.is_dir() else [found]
    if not files or not all(file.is_file() for file in files):
        raise ValueError(f"{path}: there is no Parquet file; give a .parquet file or a folder of them")
    row = 0
    for file in files:
        first = row
        try:
            with pq.ParquetFile(file) as table:
                for batch in table.iter_batches(batch_size=_BATCH_ROWS):
                    for fields in batch.to_pylist():
                        yield Record(fields, row, f"{file} row {row - first}")
                        row += 1
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{file}: not a readable Parquet file ({error}); write it again") from error
