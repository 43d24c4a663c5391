"""The file-system protocol of checkpoints: written aside, renamed when whole, marked last. No torch here.

    checkpoints/
        step_10/                 a complete checkpoint
            weights_0.distcp     model shards that rank 0 wrote (one such file a rank)
            optimizer_0.distcp   optimizer shards that rank 0 wrote
            .metadata common.pt metadata.json     Megatron-Core's torch_dist format: which shard is where
            state.json           host state: step count, sampler, generators, the caller's `extra`
            manifest.json        every file above with its size, and a checksum of the small ones
            COMPLETE             written last; holds the manifest's checksum
        step_20.tmp/             a save that is running, or was killed

A folder counts as a checkpoint only if `fault_of` finds nothing: the marker, the manifest it vouches for, and every
file of the manifest with its size. Whatever else lies there is named and left alone; only `prune` removes (complete
checkpoints that are not to be kept), and a save of step N replaces `step_N.tmp` and `step_N`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MARKER = "COMPLETE"
MANIFEST = "manifest.json"
STATE = "state.json"
SECTIONS = ("weights", "optimizer")
"""What the shard files hold, by the start of their names; a checkpoint has at least one file of each."""
CHECKSUM_LIMIT_BYTES = 4 << 20
"""Larger files get no checksum in the manifest: each tensor in them carries one that is checked when it is loaded."""

_STEP = re.compile(r"step_(\d+)")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read, for a reason outside the program (a full disk, a damaged file)."""


@dataclass(frozen=True)
class LatestCheckpoint:
    """What a look into a checkpoints folder found."""

    path: Path | None
    """The complete checkpoint with the highest step; None if there is none."""
    step: int | None
    """Its step."""
    ignored: tuple[tuple[Path, str], ...] = ()
    """Every folder that looks like a checkpoint and is not a complete one, with the reason."""


def step_of(path: Path) -> int | None:
    """The step of a folder named step_N, else None."""
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match else None


def temporary_path(directory: Path) -> Path:
    """Where a checkpoint is written before it is renamed to `directory`."""
    return directory.with_name(directory.name + ".tmp")


def write_synced(path: Path, content: bytes) -> None:
    """Writes a file through to the disk."""
    with open(path, "wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def sync_folder(path: Path) -> None:
    """Writes a folder's entries (new names, renames) through to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checksum(content: bytes) -> int:
    """CRC-32."""
    return zlib.crc32(content)


def write_manifest(folder: Path, shard_files: Iterable[str]) -> None:
    """Lists every file of a checkpoint that is ready to be published.

    Args:
        shard_files: Names of the files that the ranks report to have written; they must be here.

    Raises:
        CheckpointError: One of them is not, so the ranks do not share this file system.
    """
    for name in sorted(set(shard_files)):
        if not (folder / name).is_file():
            raise CheckpointError(
                f"save checkpoint: a rank wrote {name} but rank 0 does not see it in {folder};"
                " put the run directory on a file system that all hosts share"
            )
    files: dict[str, dict[str, int]] = {}
    for path in sorted(folder.iterdir()):
        entry = {"bytes": path.stat().st_size}
        if entry["bytes"] <= CHECKSUM_LIMIT_BYTES:
            entry["crc32"] = checksum(path.read_bytes())
        files[path.name] = entry
    write_synced(folder / MANIFEST, json.dumps({"format": 1, "files": files}, indent=1).encode())


def publish(temporary: Path, directory: Path) -> None:
    """Turns a written and listed folder into a checkpoint: rename, then the marker. Replaces one of the same name."""
    replaced = directory.with_name(directory.name + ".replaced")
    sync_folder(temporary)
    if directory.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        directory.rename(replaced)
    temporary.rename(directory)
    sync_folder(directory.parent)
    marker = {"manifest_crc32": checksum((directory / MANIFEST).read_bytes())}
    write_synced(directory / MARKER, json.dumps(marker).encode())
    sync_folder(directory)
    shutil.rmtree(replaced, ignore_errors=True)


def _read_json(path: Path) -> Any:
    """The file's content, or None if it is no JSON (a truncated file, say)."""
    try:
        return json.loads(path.read_text())
    except ValueError:
        return None


def _fault_of_file(path: Path, entry: dict[str, int]) -> str | None:
    if not path.is_file():
        return f"{path.name} is missing"
    size = path.stat().st_size
    if size != entry["bytes"]:
        return f"{path.name} has {size} bytes where {entry['bytes']} were written"
    if "crc32" in entry and checksum(path.read_bytes()) != entry["crc32"]:
        return f"the content of {path.name} is not what was written"
    return None


def fault_of(folder: Path) -> str | None:
    """Why a folder is no complete checkpoint; None if it is one."""
    marker, manifest = folder / MARKER, folder / MANIFEST
    for path in (marker, manifest):
        if not path.is_file():
            return f"{path.name} is missing (the save did not end)"
    vouched = _read_json(marker)
    if not isinstance(vouched, dict) or vouched.get("manifest_crc32") != checksum(manifest.read_bytes()):
        return f"{MANIFEST} is not the one that {MARKER} vouches for"
    files = json.loads(manifest.read_text())["files"]
    for section in SECTIONS:
        if not any(name.startswith(section + "_") for name in files):
            return f"it holds no {section}"
    for name, entry in files.items():
        fault = _fault_of_file(folder / name, entry)
        if fault is not None:
            return fault
    return None


def scan(root: Path) -> LatestCheckpoint:
    """Looks at every step_* folder of a checkpoints folder; changes nothing.

    Returns:
        The newest complete checkpoint and all incomplete ones; neither if the folder does not exist.
    """
    complete: dict[int, Path] = {}
    ignored: list[tuple[Path, str]] = []
    for path in sorted(root.glob("step_*")) if root.is_dir() else []:
        step = step_of(path)
        if step is None:
            if path.suffix in (".tmp", ".replaced"):
                ignored.append((path, "a save that did not end left it"))
            continue
        fault = fault_of(path)
        if fault is None:
            complete[step] = path
        else:
            ignored.append((path, fault))
    newest = max(complete, default=None)
    return LatestCheckpoint(complete[newest] if newest is not None else None, newest, tuple(ignored))


def prune_folder(root: Path, keep_last: int, keep: set[int]) -> list[Path]:
    """Removes complete checkpoints, except the newest `keep_last` and those of the steps in `keep`.

    Each loses its marker first, so that a prune that is killed leaves nothing that looks complete and is not.

    Returns:
        What was removed, oldest first.

    Raises:
        ValueError: keep_last is not at least 1.
    """
    if keep_last < 1:
        raise ValueError(f"prune: keep_last is {keep_last}, needed at least 1; the newest checkpoint is always kept")
    steps = {step: path for path in root.glob("step_*") if (step := step_of(path)) is not None}
    complete = sorted(step for step, path in steps.items() if fault_of(path) is None)
    removed = []
    for step in complete[:-keep_last]:
        if step not in keep:
            (steps[step] / MARKER).unlink()
            shutil.rmtree(steps[step])
            removed.append(steps[step])
    return removed
