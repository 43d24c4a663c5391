"""What the end-to-end benchmarks share: fresh processes with their peak memory, the task, medians, the machine.

Peak memory is VmHWM: the largest resident set of a process, read from /proc until it ends. Both sides of a comparison
run as fresh processes, alternating, so that neither inherits the other's memory, page cache or clock speed.
"""

from __future__ import annotations

import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
HELDOUT = REPOSITORY / "configs/data/heldout_sums.jsonl"
TEMPLATE = "2 + 5 = 7\n16 - 3 = 13\n{expression} ="
TASK_OPTIONS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2, "allow_negation": False}
TASK_SEED = 1_000_000


@dataclass(frozen=True)
class Finished:
    """A process that ended well."""

    seconds: float
    peak_bytes: int
    stdout: str


def peak_resident_bytes(pid: int | str = "self") -> int:
    """VmHWM of a process; 0 when it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    return int(found.group(1)) * 1024 if found else 0


def run_measured(
    command: Sequence[Any], *, timeout_s: float, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> Finished:
    """Runs a command in a fresh process, sampling its peak memory ten times a second.

    Raises: SystemExit with the tail of its output when it fails or runs past `timeout_s`.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        start = time.perf_counter()
        process = subprocess.Popen(
            [str(part) for part in command], stdout=out, stderr=err, env={**os.environ, **(env or {})}, cwd=cwd
        )
        peak = 0
        try:
            while process.poll() is None:
                peak = max(peak, peak_resident_bytes(process.pid))
                if time.perf_counter() - start > timeout_s:
                    raise SystemExit(f"still running after {timeout_s} s: {' '.join(map(str, command))}")
                time.sleep(0.1)
        finally:
            process.kill()
            process.wait()
        seconds = time.perf_counter() - start
        out.seek(0)
        err.seek(0)
        stdout, stderr = out.read(), err.read()
    if process.returncode != 0:
        shown = " ".join(map(str, command))
        raise SystemExit(f"exit status {process.returncode}: {shown}\n{stdout[-1500:]}\n{stderr[-3000:]}")
    return Finished(seconds, peak, stdout)


def run_json(command: Sequence[Any], *, timeout_s: float) -> dict[str, Any]:
    """Runs a program that prints one JSON object as its last line; adds wall_s and peak_bytes where it lacks them."""
    done = run_measured(command, timeout_s=timeout_s)
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return {"wall_s": done.seconds, "peak_bytes": done.peak_bytes} | result


def medians(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Median of every number that all rows have."""
    names = set.intersection(*(set(row) for row in rows))
    numbers = (n for n in sorted(names) if all(isinstance(row[n], int | float) for row in rows))
    return {name: statistics.median(float(row[name]) for row in rows) for name in numbers}


def machine() -> dict[str, Any]:
    """The processor, its cores and the versions that the figures were taken with."""
    import torch

    model = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    return {
        "cpu": model.group(1) if model else platform.processor(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
    }


def heldout_problems(path: Path) -> list[dict[str, str]]:
    """Records with "prompt" and "answer"."""
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    return [{"prompt": row["prompt"], "answer": str(row["answer"])} for row in rows]


def training_problems(size: int, exclude: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """The quickstart's training problems, distinct from every held-out one."""
    import reasoning_gym

    held_out = {row["prompt"] for row in exclude}
    entries = reasoning_gym.create_dataset("chain_sum", size=size, seed=TASK_SEED, **TASK_OPTIONS)
    rows = [
        {"prompt": TEMPLATE.format(expression=entry["metadata"]["expression"]), "answer": str(entry["answer"])}
        for entry in entries
    ]
    return [row for row in rows if row["prompt"] not in held_out]


def first_integer(text: str) -> str | None:
    """What counts as the answer, on both sides: the quickstart's `extract: first_integer`."""
    from grpo_mc.rewards.extract import extract_answer

    return extract_answer(text, "first_integer")


def hf_model_folder(model: str) -> Path:
    """`model` as a Hugging Face folder; anything else grpo-mc can read is imported into a cache first."""
    if (Path(model) / "config.json").is_file():
        return Path(model)
    cache = Path(os.environ.get("GRPO_MC_CACHE", Path.home() / ".cache/grpo_mc"))
    folder = cache / "benchmarks" / re.sub(r"\W+", "-", model)
    if not (folder / "config.json").is_file():
        command = [sys.executable, "-m", "grpo_mc", "convert", "import", model, folder]
        run_measured(command, timeout_s=1200, cwd=REPOSITORY)
    return folder


def print_table(title: str, rows: Sequence[Sequence[str]]) -> None:
    """A plain table; the first row is the heading."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    print(f"\n{title}")
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def error_bar(accuracy: float, problems: int) -> float:
    """Standard error of an accuracy over `problems` independent problems."""
    return (accuracy * (1.0 - accuracy) / problems) ** 0.5
