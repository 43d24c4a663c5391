"""Builds csrc/cuda/*.cu with the C++ compiler, to run the CUDA kernels thread by thread on the CPU.

`library()` compiles the kernels against tests/cuda_emulator and returns the path; `torch.ops.grpo_mc.load_cuda` with
`emulated` then sends every call of this process to them. The environment variable GRPO_MC_TEST_EMULATED makes
tests/conftest.py do so, which is how tests/cuda runs the operators' own tests over the CUDA kernels.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch

from grpo_mc.ops.loader import load

ROOT = Path(__file__).resolve().parents[2]
EMULATOR = ROOT / "tests" / "cuda_emulator"
FLAGS = ["-O2", "-std=c++20", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-mf16c", "-Wall", "-Werror"]
FLAGS += ["-Wno-psabi", "-Wno-unknown-pragmas", f"-I{EMULATOR}", f"-I{ROOT / 'csrc'}"]
TIMEOUT_S = 600
IS_USED = bool(os.environ.get("GRPO_MC_TEST_EMULATED") or os.environ.get("GRPO_MC_TEST_CUDA"))
"""True in a run over the CUDA kernels, here or on a GPU: their drivers check no values, which would wait for it."""


def library() -> Path:
    """The emulated library, compiled anew when a source has changed; safe when several processes ask at once."""
    sources = [*sorted((ROOT / "csrc" / "cuda").glob("*.cu")), EMULATOR / "emulator.cpp"]
    folders = (EMULATOR, ROOT / "csrc" / "cuda", ROOT / "csrc" / "common")
    headers = [path.read_bytes() for folder in folders for path in sorted(folder.glob("*.h"))]
    common = hashlib.sha256(" ".join(FLAGS).encode() + b"".join(headers)).hexdigest()
    checkout = hashlib.sha256(str(ROOT).encode()).hexdigest()[:8]
    folder = Path(tempfile.gettempdir(), f"grpo_mc_cuda_emulator_{os.getuid()}_{checkout}")
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(lambda source: _compile(source, folder, common), sources))
        mark = hashlib.sha256(" ".join(str(path) for path in objects).encode()).hexdigest()[:16]
        target = folder / f"emulated_{mark}.so"
        if not target.exists():
            _run(["c++", "-shared", *map(str, objects), "-o", str(target)])
    return target


@contextmanager
def emulated() -> Iterator[None]:
    """Within, every operator of this process runs its CUDA kernels on the CPU."""
    torch.ops.grpo_mc.load_cuda(str(library()), True)
    try:
        yield
    finally:
        torch.ops.grpo_mc.load_cuda("", False)
        load.cache_clear()  # loads the library of nvcc again, where there is one
        load()


def _compile(source: Path, folder: Path, common: str) -> Path:
    mark = hashlib.sha256(common.encode() + source.read_bytes()).hexdigest()[:16]
    target = folder / f"{source.stem}_{mark}.o"
    if not target.exists():
        partial = target.with_suffix(".partial")
        _run(["c++", *FLAGS, "-x", "c++", "-c", str(source), "-o", str(partial)])
        partial.rename(target)
    return target


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
