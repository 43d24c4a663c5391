"""Hugging Face datasets saved to disk: the folder that `Dataset.save_to_disk` writes.

state.json names the data files, which are Arrow streams; pyarrow reads them, so the `datasets` library is not needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from grpo_mc.data.sources import Record
from grpo_mc.data.strict_json import parse_json


def read_hf(path: str) -> Iterator[Record]:
    """The records of a saved dataset, in order.

    Raises:
        ValueError: not such a folder, several splits to choose from, or a broken file; names it.
    """
    folder = _one_split(Path(path))
    row = 0
    for file in _data_files(folder):
        first = row
        try:
            with pa.memory_map(str(file)) as mapped, pa.ipc.open_stream(mapped) as stream:
                for batch in stream:
                    for fields in batch.to_pylist():
                        yield Record(fields, row, f"{file} row {row - first}")
                        row += 1
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{file}: not a readable Arrow file ({error}); save the dataset again") from error


def _one_split(folder: Path) -> Path:
    """The folder itself, or its only split if it is a DatasetDict."""
    index = folder / "dataset_dict.json"
    if not index.is_file():
        return folder
    splits = _read_object(index).get("splits", [])
    if len(splits) != 1:
        raise ValueError(
            f"{folder}: it holds the splits {', '.join(map(str, splits)) or 'none'}; give the folder of one of them, "
            f"e.g. {folder / str((splits or ['train'])[0])}"
        )
    return folder / str(splits[0])


def _data_files(folder: Path) -> list[Path]:
    state_file = folder / "state.json"
    if not state_file.is_file():
        raise ValueError(f"{folder}: there is no state.json; give a folder that Dataset.save_to_disk wrote")
    state = _read_object(state_file)
    if state.get("_indices_data_files"):
        raise ValueError(f"{folder}: its rows are selected by an index file; save it again after flatten_indices()")
    names = [entry.get("filename") for entry in state.get("_data_files", [])]
    for name in names:
        # a name with a folder in it could lead out of the dataset
        if not isinstance(name, str) or Path(name).name != name or not (folder / name).is_file():
            raise ValueError(f"{state_file}: _data_files names {name!r}, which is no file of {folder}; save it again")
    return [folder / name for name in names]


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error}); save the dataset again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: holds a {type(value).__name__}, an object is needed; save the dataset again")
    return value
