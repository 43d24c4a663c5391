"""Times one operator against one baseline: alternating runs in one process, medians, error, peak memory.

Alternating (ours, baseline, ours, ...) puts both under the same clock, the same neighbours and the same heap; the
median of an odd number of runs forgets the disturbed ones. Work before a run that belongs to neither (a fresh copy of
logits that the operator overwrites) is done in `prepare` and not timed.
"""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

ROUNDS = 9
"""Timed runs of each side; the first run of each, which warms up, is not counted."""

CACHE_BYTES = 2**28
"""More than a GPU's caches hold."""


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table: an operator on one shape against one baseline."""

    op: str
    shape: dict[str, int]
    dtype: str
    baseline_name: str
    ours: Callable[[Any], Any]
    """Takes what prepare returns; its result goes to `error`."""
    baseline: Callable[[Any], Any]
    error: Callable[[Any], float]
    """Relative error of ours: max over tensors of ||difference|| / ||float64 reference||."""
    prepare: Callable[[], Any] = lambda: None
    num_bytes: float = 0
    """Bytes the operator must move at least; gives gbps."""
    flops: float = 0
    """Floating-point operations; gives gflops instead."""
    device: str = "cpu"


@cache
def machine(device: str) -> str:
    """The GPU's name; or the processor's, the cores this process may use, and the vector instructions torch uses."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    name = models[0] if models else platform.processor()
    return f"{name}, {len(os.sched_getaffinity(0))} cores, {torch.backends.cpu.get_cpu_capability()}"


def relative_error(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Largest ||actual - expected|| / ||expected|| over the tensors, computed in float64."""
    errors = [0.0]
    for ours, theirs in zip(actual, expected, strict=True):
        reference = theirs.detach().double()
        difference = float((ours.detach().double() - reference).norm())
        errors.append(difference / max(float(reference.norm()), 1e-300) if difference else 0.0)
    return max(errors)


def _settle(device: str) -> None:
    """On a GPU, waits for what is queued."""
    if device == "cuda":
        torch.cuda.synchronize()


def _seconds(function: Callable[[Any], Any], prepare: Callable[[], Any], device: str) -> float:
    argument = prepare()
    if device == "cuda":  # a cache full of zeros instead of the inputs
        torch.zeros(CACHE_BYTES, dtype=torch.uint8, device=device)
    _settle(device)
    start = time.perf_counter()
    result = function(argument)
    _settle(device)
    elapsed = time.perf_counter() - start
    del result, argument
    return elapsed


def _status(field: str) -> int:
    """A size in bytes from /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"bench: /proc/self/status has no {field}")


def peak_bytes(function: Callable[[Any], Any], prepare: Callable[[], Any], device: str = "cpu") -> int | None:
    """Most memory one run held beyond what was resident before it; None where the kernel does not let us reset it."""
    argument = prepare()
    gc.collect()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        result = function(argument)
        return torch.cuda.max_memory_allocated() - held
    # Freed memory that the C library keeps would hide what the run takes.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to VmRSS
    except OSError:
        return None
    before = _status("VmRSS")
    result = function(argument)
    peak = _status("VmHWM") - before
    del result, argument
    return max(peak, 0)


def measure(case: Case, rounds: int = ROUNDS) -> dict[str, Any]:
    """One row: the fields of the benchmark table, ready for JSON."""
    result = case.ours(case.prepare())
    error = case.error(result)
    del result
    _seconds(case.baseline, case.prepare, case.device)
    ours, baseline = [], []
    for _ in range(rounds):
        ours.append(_seconds(case.ours, case.prepare, case.device))
        baseline.append(_seconds(case.baseline, case.prepare, case.device))
    seconds, baseline_seconds = statistics.median(ours), statistics.median(baseline)
    rate = {"gflops": case.flops / seconds / 1e9} if case.flops else {"gbps": case.num_bytes / seconds / 1e9}
    return {
        "op": case.op,
        "device": case.device,
        "shape": case.shape,
        "dtype": case.dtype,
        "threads": torch.get_num_threads(),
        "seconds": seconds,
        "baseline_seconds": baseline_seconds,
        "ratio": baseline_seconds / seconds,
        "baseline_name": case.baseline_name,
        **{name: round(value, 2) for name, value in rate.items()},
        "rel_error": error,
        "peak_bytes": peak_bytes(case.ours, case.prepare, case.device),
        "machine": machine(case.device),
    }


def on_one_thread(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The same function on one thread: as a baseline its ratio is the scaling from one thread to all of them."""

    def run(argument: Any) -> Any:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return function(argument)
        finally:
            torch.set_num_threads(threads)

    return run
