"""Loads the compiled operators into torch.ops.grpo_mc, once, when grpo_mc.ops is imported.

A missing library and one built against another torch are refused with the command that mends them; there is no silent
fallback to slow code. This is the one file that asks torch about CUDA.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from functools import cache
from pathlib import Path

import torch

FOLDER = Path(__file__).parent
SOURCES = FOLDER.parents[1] / "csrc"
"""The sources of an editable installation; an installed package has none."""
LIBRARY = FOLDER / "_C.abi3.so"
CUDA_LIBRARY = FOLDER / "_cuda.so"
BUILD_COMMAND = "pip install --no-build-isolation -e .   (in the grpo_mc checkout, with the torch you run)"
_MARKER = re.compile(rb"grpo_mc-built-with-torch=([0-9A-Za-z.+_-]+);")


class OperatorsMissing(ImportError):
    """The compiled operators cannot be used: not built, or built against another torch."""


def built_torch(library: Path) -> str:
    """Version of torch that `library` was built against, read from the file without loading it."""
    found = _MARKER.search(library.read_bytes())
    if found is None:
        raise OperatorsMissing(f"grpo_mc.ops: {library} is no library of this package; build it: {BUILD_COMMAND}")
    return found.group(1).decode()


def check_version(built: str, running: str) -> None:
    """The C++ interface of torch changes with every minor version: refuse a library from another one."""
    if built.split(".")[:2] != running.split(".")[:2]:
        raise OperatorsMissing(
            f"grpo_mc.ops: the compiled operators were built with torch {built} but torch {running} is running; "
            f"build them again: {BUILD_COMMAND}"
        )


def newer_source(library: Path, sources: Path) -> Path | None:
    """The newest file under `sources` if it is newer than `library`: a checkout that moved on since it was built."""
    files = [path for path in sources.rglob("*") if path.suffix in (".cpp", ".h", ".cu")]
    newest = max(files, key=lambda path: path.stat().st_mtime, default=None)
    return newest if newest is not None and newest.stat().st_mtime > library.stat().st_mtime else None


@cache
def load() -> None:
    """Load the CPU library, and the CUDA one where it was built. Warns when a checkout's sources are newer.

    Raises:
        OperatorsMissing: the CPU library is absent, built against another torch, or does not load.
    """
    if not LIBRARY.exists():
        raise OperatorsMissing(f"grpo_mc.ops: the compiled operators are not built ({LIBRARY}); run: {BUILD_COMMAND}")
    check_version(built_torch(LIBRARY), torch.__version__)
    newer = newer_source(LIBRARY, SOURCES)
    if newer is not None:
        warnings.warn(f"grpo_mc.ops: {newer} is newer than the compiled operators; run: {BUILD_COMMAND}", stacklevel=2)
    try:
        torch.ops.load_library(str(LIBRARY))
    except OSError as error:
        raise OperatorsMissing(
            f"grpo_mc.ops: {LIBRARY} does not load with torch {torch.__version__}: {error}; "
            f"build it again: {BUILD_COMMAND}"
        ) from error
    if CUDA_LIBRARY.exists():
        try:
            torch.ops.grpo_mc.load_cuda(str(CUDA_LIBRARY), False)
        except RuntimeError as error:  # the CPU operators are good without it
            warnings.warn(f"grpo_mc.ops: CUDA operators are off, {CUDA_LIBRARY} does not load: {error}", stacklevel=2)


def implements(operator: str, device: str) -> bool:
    """Whether an operator of csrc/ops.cpp has an implementation for a type of device ("cpu", "cuda")."""
    load()
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"grpo_mc::{operator}", device.upper())


def info() -> dict[str, object]:
    """What is loaded: package version, torch built against and running, devices, CPU code chosen, threads.

    `cpu_isa` is "avx2" or "generic"; the environment variable GRPO_MC_CPU_ISA (auto, generic, avx2) overrides the
    choice made by cpuid. `cuda_library` tells whether the CUDA operators were built, `devices` where they can run.
    """
    from grpo_mc import __version__

    load()
    built = json.loads(torch.ops.grpo_mc.build_info())
    has_cuda = CUDA_LIBRARY.exists()
    return {
        "version": __version__,
        "built_torch": built["built_torch"],
        "torch": torch.__version__,
        "devices": ["cpu", "cuda"] if has_cuda and torch.cuda.is_available() else ["cpu"],
        "cuda_library": has_cuda,
        "cpu_isa": built["cpu_isa"],
        "threads": torch.get_num_threads(),
        "cpus": os.cpu_count(),
    }
