"""Safetensors files, one tensor at a time, without mapping the file.

Layout of a file: 8 bytes little-endian length n of the header, n bytes of JSON (trailing blanks allowed), then the
data. The header maps a tensor's name to {"dtype", "shape", "data_offsets": [begin, end]}, offsets counted from the
end of the header; the tensors fill the data without gaps. `__metadata__` holds strings.

The library's own reader maps the whole file, so every page it touches counts in the process's resident memory until
the file is closed. Loading here needs no more memory than the tensor asked for.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_mc.data.strict_json import parse_json

# Only the dtypes of unquantised weights; anything else is refused by name.
DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_DOWNLOAD_AGAIN = "the copy is incomplete or damaged; download or copy the file again"


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies: `begin` is its byte offset in the file."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Read and check the header of a safetensors file; no tensor is read.

    Raises:
        ValueError: the file is missing, truncated, too long or damaged, or holds a dtype that is not in DTYPES.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
                raise _damaged(path, f"has {size} bytes, too few for its header")
            raw = file.read(length)
    except FileNotFoundError:
        raise ValueError(f"read weights: {path} is missing; download or copy the file again") from None
    except OSError as error:
        raise _unreadable(path, error) from error
    try:
        header = parse_json(raw)
    except ValueError as error:
        raise _damaged(path, f"has no readable header ({error})") from error
    if not isinstance(header, dict):
        raise _damaged(path, "has no readable header (not a JSON object)")
    entries = {
        name: _entry(path, name, fields, 8 + length) for name, fields in header.items() if name != "__metadata__"
    }
    _check_fill(path, entries, 8 + length, size)
    return entries


def _check_fill(path: Path, entries: dict[str, TensorEntry], begin: int, size: int) -> None:
    """The tensors must follow each other without overlap or gap: bytes read twice, or left out, are wrong weights."""
    end, before = begin, "the header"
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].num_bytes)):
        if entry.begin != end:
            how = "overlaps" if entry.begin < end else "leaves a gap after"
            raise _damaged(
                path, f"gives tensor '{name}' data from byte {entry.begin - begin} on, which {how} {before} "
                f"(that ends at byte {end - begin})"
            )  # fmt: skip
        end, before = entry.begin + entry.num_bytes, f"tensor '{name}'"
    if size != end:
        raise _damaged(path, f"has {size} bytes but its header describes {end}")


def _entry(path: Path, name: str, fields: Any, data_begin: int) -> TensorEntry:
    try:
        begin, end = fields["data_offsets"]
        shape = tuple(fields["shape"])
        dtype_name = fields["dtype"]
        is_sound = isinstance(dtype_name, str) and all(
            isinstance(value, int) and not isinstance(value, bool) and value >= 0 for value in (begin, end, *shape)
        )
    except (TypeError, KeyError, ValueError):
        is_sound = False
    if not is_sound:
        raise _damaged(path, f"describes tensor '{name}' wrongly")
    if dtype_name not in DTYPES:
        raise ValueError(
            f"read weights: {path}: tensor '{name}' has dtype {dtype_name}, needed one of {', '.join(DTYPES)}; "
            "use the unquantised weights of the model"
        )
    entry = TensorEntry(path, DTYPES[dtype_name], shape, data_begin + begin)
    if entry.num_bytes != end - begin:
        raise _damaged(
            path, f"gives tensor '{name}' {end - begin} bytes where {list(shape)} {dtype_name} needs {entry.num_bytes}"
        )
    return entry


def _damaged(path: Path, what: str) -> ValueError:
    return ValueError(f"read weights: {path} {what}; {_DOWNLOAD_AGAIN}")


def _unreadable(path: Path, error: OSError) -> ValueError:
    return ValueError(f"read weights: {path} cannot be read ({error}); check the file and its permissions")


def read_tensor(entry: TensorEntry, rows: tuple[int, int] | None = None) -> Tensor:
    """Read one tensor, or rows [start, stop) of its first dimension, into memory of its own.

    Raises:
        ValueError: the file ends early or cannot be read any more.
    """
    shape, offset = entry.shape, entry.begin
    if rows is not None:
        start, stop = rows
        assert shape and 0 <= start <= stop <= shape[0], (entry, rows)
        offset += start * math.prod(shape[1:]) * entry.dtype.itemsize
        shape = (stop - start, *shape[1:])
    out = torch.empty(shape, dtype=entry.dtype)
    if out.numel() == 0:
        return out
    buffer = tensor_bytes(out)
    try:
        with entry.path.open("rb", buffering=0) as file:
            done = 0
            while done < len(buffer):
                count = os.preadv(file.fileno(), [buffer[done:]], offset + done)
                if count == 0:
                    raise _damaged(entry.path, "ends early")
                done += count
    except OSError as error:
        raise _unreadable(entry.path, error) from error
    return out


def tensor_bytes(tensor: Tensor) -> memoryview:
    """View the memory of a contiguous CPU tensor as bytes; writing to the view writes the tensor."""
    return tensor.view(-1).view(torch.uint8).numpy().data


def layout(
    shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, path: Path
) -> tuple[bytes, dict[str, TensorEntry]]:
    """Plan a file: return the bytes that stand before its data and the place of every tensor, in the order given."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, shape in shapes.items():
        end = position + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [position, end]}
        position = end
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)  # the format asks for data aligned to 8 bytes
    begin = 8 + len(raw)
    entries = {
        name: TensorEntry(path, dtype, tuple(shape), begin + header[name]["data_offsets"][0])
        for name, shape in shapes.items()
    }
    return len(raw).to_bytes(8, "little") + raw, entries
