"""How much memory processes of this machine may use, read from the kernel (nothing else has to work for it)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


def memory_sizes() -> dict[str, int]:
    """Bytes by the names of /proc/meminfo: MemTotal, MemAvailable, SwapTotal, ...

    Raises:
        OSError, ValueError: the system does not tell, or not in this form.
    """
    lines = Path("/proc/meminfo").read_text("ascii").splitlines()
    fields = (line.split(":", 1) for line in lines if line.endswith("kB"))
    return {name: int(value.split()[0]) * 1024 for name, value in fields}


def group_limit() -> int | None:
    """The smallest memory limit of this process's control groups in bytes; None where there is none."""
    limits = []
    for path in _limit_files():
        try:
            text = path.read_text("ascii").strip()
        except OSError:
            continue
        if text.isdecimal() and int(text) < 1 << 60:  # "max", and in version 1 a huge number, is no limit
            limits.append(int(text))
    return min(limits, default=None)


def total_memory() -> int | None:
    """Bytes of memory and swap that processes here may use together: the machine's, or the control group's limit if
    that is less; None where the system does not tell."""
    try:
        sizes = memory_sizes()
        total = sizes["MemTotal"] + sizes.get("SwapTotal", 0)
    except (OSError, KeyError, ValueError):
        return None
    limit = group_limit()
    return total if limit is None else min(total, limit)


def _limit_files() -> Iterator[Path]:
    """The limit of this process's control group and of those above it, in both versions of the file system."""
    try:
        lines = Path("/proc/self/cgroup").read_text("utf-8").splitlines()
    except OSError:
        lines = []
    own = ["/"]
    for line in lines:
        _, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        if controllers in ("", "memory"):
            own.append(path)
    for path in dict.fromkeys(own):
        group = Path("/" + path.lstrip("/"))
        for level in (group, *group.parents):
            yield _CGROUPS / str(level).lstrip("/") / "memory.max"
            yield _CGROUPS / "memory" / str(level).lstrip("/") / "memory.limit_in_bytes"
