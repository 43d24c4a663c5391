"""What `grpo-mc bench` runs: each operator against its baselines, one row a line.

A module here is named after its operator and has `cases()`, an iterator of `timing.Case`. `ratio` is baseline / ours;
`peak_bytes` what one run of ours holds beyond its inputs, outputs included.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
from pathlib import Path
from typing import Any

from grpo_mc.ops.bench.timing import ROUNDS, measure
from grpo_mc.ops.loader import info

KEY = ("op", "device", "shape", "dtype", "threads", "baseline_name")
"""What identifies a row between two runs."""

ALL = "all"

ONE_THREAD = "ours on 1 thread"
"""The baseline that shows the scaling over threads."""


def names() -> list[str]:
    """Operators that have a benchmark."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name != "timing")


def run(
    operator: str, *, as_json: bool = False, compare: Path | None = None, rounds: int = ROUNDS, device: str = "cpu"
) -> int:
    """Measure every row of one operator and print it as soon as it is known.

    Args:
        operator: one of names(), or ALL: one after the other.
        as_json: print one JSON object a line; otherwise a readable line.
        compare: file of an earlier as_json run; each line then also says how seconds and ratio moved.
        rounds: timed runs of each side, at least 1.
        device: "cpu" or "cuda".

    Returns:
        0.

    Raises:
        ValueError: unknown operator, rounds below 1, a device without operators, or a compare file that holds no rows.
    """
    if operator == ALL:
        for name in names():
            run(name, as_json=as_json, compare=compare, rounds=rounds, device=device)
        return 0
    if operator not in names():
        raise ValueError(f"bench: no operator {operator!r}; operators are {', '.join(names())}, or {ALL}")
    if rounds < 1:
        raise ValueError(f"bench: rounds is {rounds}; it must be at least 1")
    devices = info()["devices"]
    if device not in devices:  # type: ignore[operator]
        raise ValueError(f"bench: device is {device!r}; the operators run here on {devices}")
    earlier = {} if compare is None else read_rows(compare)
    for case in importlib.import_module(f"{__name__}.{operator}").cases(device):
        if device != "cpu" and case.baseline_name.startswith(ONE_THREAD):
            continue
        row = measure(case, rounds)
        before = earlier.get(key_of(row))
        if before is not None:
            row["seconds_before"], row["ratio_before"] = before["seconds"], before["ratio"]
        print(json.dumps(row) if as_json else describe(row), flush=True)
    return 0


def key_of(row: dict[str, Any]) -> str:
    """Identity of a row, as text."""
    return json.dumps([row[name] for name in KEY], sort_keys=True)


def read_rows(path: Path) -> dict[str, dict[str, Any]]:
    """Rows of an earlier run by identity; lines that are no JSON objects are passed over (headers, warnings)."""
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.startswith("{")]
    if not rows:
        raise ValueError(f"bench: {path} holds no JSON rows; write one with: grpo-mc bench OP --json > {path}")
    for row in rows:
        missing = [name for name in (*KEY, "seconds", "ratio") if name not in row]
        if missing:
            raise ValueError(
                f"bench: a row of {path} lacks {', '.join(missing)}; write it with: grpo-mc bench OP --json"
            )
    return {key_of(row): row for row in rows}


def describe(row: dict[str, Any]) -> str:
    """One readable line."""
    shape = " ".join(f"{name}={size}" for name, size in row["shape"].items())
    rate = f"{row['gflops']:.1f} GFLOP/s" if "gflops" in row else f"{row['gbps']:.1f} GB/s"
    peak = "peak unknown" if row["peak_bytes"] is None else f"peak {row['peak_bytes'] / 2**20:.0f} MiB"
    where = f"threads={row['threads']}" if row["device"] == "cpu" else row["device"]
    line = (
        f"{row['op']} {shape} {row['dtype']} {where}: {row['seconds'] * 1e3:.3f} ms, {rate}, {peak}, "
        f"error {row['rel_error']:.1e}; {speed_text(row['ratio'])} than {row['baseline_name']} "
        f"({row['baseline_seconds'] * 1e3:.3f} ms)"
    )
    if "seconds_before" in row:
        change = (row["seconds"] / row["seconds_before"] - 1) * 100
        line += (
            f" (before: {row['seconds_before'] * 1e3:.3f} ms, {speed_text(row['ratio_before'])}; time {change:+.0f} %)"
        )
    return line


def speed_text(ratio: float) -> str:
    """The ratio baseline / ours in words: "4.05x faster", "1.25x slower"."""
    return f"{ratio:.2f}x faster" if ratio >= 1 else f"{1 / ratio:.2f}x slower"
