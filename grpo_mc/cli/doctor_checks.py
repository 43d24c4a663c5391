"""The checks of `grpo-mc doctor`. Each is quick and bounded, changes nothing, and never raises: a broken part is its
result."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_mc.data.host_memory import group_limit, memory_sizes
from grpo_mc.monitor.formats import counted

TESTED = {
    "torch": ("2.11", "2.15", "2.13.0"),
    "megatron-core": ("0.16.1", "0.20", "0.16.1"),
    "transformers": ("5.16", "5.20", "5.19"),
}
"""Package -> (lowest version, first version that is too new, version tested most); the ranges of pyproject.toml."""

REQUIRED = ("gguf", "math-verify", "numpy", "psutil", "pyarrow", "pydantic", "pyyaml", "reasoning-gym", "rich",
            "safetensors")  # fmt: skip
"""The other packages of pyproject.toml's dependencies."""

MIN_DISK_BYTES = 2_000_000_000
MIN_MEMORY_BYTES = 4_000_000_000
MIN_SHARED_MEMORY_BYTES = 64 << 20


@dataclass(frozen=True)
class Check:
    """The result of one check."""

    name: str
    status: str
    """"ok", "warn" or "fail"."""
    detail: str
    advice: str = ""
    """What to do; empty when nothing."""


def all_checks(probe_timeout_s: float) -> Iterator[Check]:
    """Runs every check, the quick ones first."""
    yield check_python()
    yield check_processor()
    yield check_memory()
    yield check_disk(Path.cwd())
    yield check_shared_memory()
    yield check_packages()
    for name in TESTED:
        yield check_version(name)
    yield check_operators()
    yield check_writable("working directory", Path.cwd())
    yield check_writable("cache", cache_directory())
    yield check_port()
    yield check_process_group(probe_timeout_s)


def check_python() -> Check:
    version = platform.python_version()
    if (3, 11) <= sys.version_info[:2] <= (3, 13):
        return Check("python", "ok", f"{version} ({sys.executable})")
    return Check("python", "fail", f"{version}; needs 3.11 to 3.13", "make a virtual environment with another Python")


def check_processor() -> Check:
    cores = len(os.sched_getaffinity(0))
    threads = os.environ.get("OMP_NUM_THREADS")
    detail = f"{counted(cores, 'core')} usable of {os.cpu_count()}, {platform.machine()}"
    if threads is not None and threads.isdigit() and int(threads) > cores:
        advice = f"set OMP_NUM_THREADS={cores} or less"
        return Check("processor", "warn", f"{detail}, OMP_NUM_THREADS={threads}", advice)
    return Check("processor", "ok", detail)


def check_memory() -> Check:
    sizes, limit = memory_sizes(), group_limit()
    total, available = sizes["MemTotal"], sizes["MemAvailable"]
    detail = f"{available / 1e9:.1f} GB available of {total / 1e9:.1f} GB"
    if limit is not None:
        available = min(available, limit)
        detail += f", limited to {limit / 1e9:.1f} GB for this container"
    if available < MIN_MEMORY_BYTES:
        return Check("memory", "warn", detail, "the quickstart needs about 4 GB; end other programs")
    return Check("memory", "ok", detail)


def check_disk(folder: Path) -> Check:
    free = shutil.disk_usage(folder).free
    detail = f"{free / 1e9:.1f} GB free at {folder}"
    if free < MIN_DISK_BYTES:
        return Check("disk", "warn", detail, "checkpoints need about 5 times the model's size; set run.dir elsewhere")
    return Check("disk", "ok", detail)


def check_shared_memory() -> Check:
    path = Path("/dev/shm")
    if not path.is_dir():
        return Check("shared memory", "warn", "/dev/shm is not there", "mount a tmpfs there for several processes")
    size = shutil.disk_usage(path).total
    if size <= MIN_SHARED_MEMORY_BYTES:
        advice = "start the container with --shm-size=1g for several GPUs"
        return Check("shared memory", "warn", f"/dev/shm holds {size / 1e6:.0f} MB", advice)
    return Check("shared memory", "ok", f"/dev/shm holds {size / 1e9:.1f} GB")


def check_version(name: str) -> Check:
    lowest, below, tested = TESTED[name]
    allowed = f">={lowest},<{below}"
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Check(name, "fail", f"not installed; needs {allowed}", f"pip install '{name}{allowed}'")
    public = found.partition("+")[0]
    if not version_key(lowest) <= version_key(public) < version_key(below):
        return Check(name, "fail", f"{found}; needs {allowed}", f"pip install '{name}{allowed}'")
    if version_key(public)[: len(version_key(tested))] != version_key(tested):
        return Check(name, "ok", f"{found} (in range {allowed}; tested most with {tested})")
    return Check(name, "ok", f"{found} (tested)")


def version_key(version: str) -> tuple[int, ...]:
    """The leading numbers of a version, for comparing: "2.13.0rc1" -> (2, 13, 0)."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in numbers[0].split(".")) if numbers else ()


def check_packages() -> Check:
    missing = [name for name in REQUIRED if not _is_installed(name)]
    if missing:
        return Check("packages", "fail", f"missing: {', '.join(missing)}", f"pip install {' '.join(missing)}")
    return Check("packages", "ok", f"{len(REQUIRED)} required packages are installed")


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def check_operators() -> Check:
    from grpo_mc.cli import calls

    try:
        info = calls.operators_info()
    # A process boundary of a kind: whatever keeps the library from loading is what this check is to report.
    except Exception as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        return Check("compiled operators", "fail", first_line, "build them: pip install --no-build-isolation -e .")
    detail = operators_text(info)
    if info.get("cpu_isa") == "generic" and platform.machine() in ("x86_64", "amd64"):
        advice = "no AVX2 on this processor, so plain code is used, which is several times slower"
        return Check("compiled operators", "warn", detail, advice)
    return Check("compiled operators", "ok", detail)


def operators_text(info: dict[str, Any]) -> str:
    """What the operators say of themselves (ops.loader.info) in words."""
    if not info["cuda_library"]:
        cuda = "not built for CUDA"
    else:
        cuda = "built for CUDA" if "cuda" in info["devices"] else "built for CUDA, but no CUDA device is usable"
    return (
        f"version {info['version']}, built with torch {info['built_torch']}, {info['cpu_isa']} code on the CPU "
        f"({counted(info['threads'], 'thread')} of {counted(info['cpus'], 'core')}), {cuda}"
    )


def cache_directory() -> Path:
    """The cache folder, or its nearest parent that exists."""
    from grpo_mc.data.cache import cache_root

    path = cache_root().absolute()
    return next(folder for folder in (path, *path.parents) if folder.exists())


def check_writable(name: str, folder: Path) -> Check:
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".grpo_mc_doctor_") as handle:
            handle.write(b"x" * 4096)
            handle.flush()
            os.fsync(handle.fileno())
    except OSError as error:
        advice = "set GRPO_MC_CACHE to a writable folder" if name == "cache" else "change to a writable folder"
        return Check(name, "fail", f"cannot write to {folder}: {error.strerror}", advice)
    return Check(name, "ok", f"{folder} is writable")


def check_port() -> Check:
    try:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            port = listener.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), timeout=5):
                pass
    except OSError as error:
        return Check("ports", "fail", f"no local TCP connection: {error}", "allow TCP on the loopback interface")
    return Check("ports", "ok", f"local TCP works (port {port} was free)")


def check_process_group(timeout_s: float) -> Check:
    from grpo_mc.cli.probe import probe_process_group

    problem, seconds = probe_process_group(timeout_s)
    if problem:
        advice = "set GLOO_SOCKET_IFNAME to an interface that works (often lo), and look at firewall and /etc/hosts"
        return Check("process group", "fail", problem, advice)
    return Check("process group", "ok", f"two gloo processes summed a tensor in {seconds:.1f} s")
