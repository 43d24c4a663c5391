"""`grpo-mc check parity`: the same loss and the same gradients whatever the layout.

The reference is one process that trains on every response separately, with a prompt of its own. Each layout then trains
on the same batch from the same weights (parity_problem), cut into micro-batches, packed, sharded and pipelined, and its
log-probs, loss and every gradient are compared with the reference's: |difference| / |loss|, and ||difference|| /
||gradient|| per tensor, in float32, for two objectives.

The check always runs on the CPU, where it needs no GPUs of its own. It starts one clean process (one thread, no CUDA),
which imports the engine once and forks the ranks of one layout after another from there; every layout is bounded in
time, and what is left of it is ended before the next.
"""

from __future__ import annotations

import faulthandler
import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_mc.config.base import ConfigError
from grpo_mc.megatron.hf_config import ModelArchitecture, model_shape
from grpo_mc.megatron.parity_layout import (
    DEFAULT_LAYOUTS,
    REFERENCE,
    TINY_MIXTRAL,
    ParityLayout,
    fit,
    parse_layout,
)

if TYPE_CHECKING:
    from torch import Tensor

    from grpo_mc.megatron.parity_rank import Measurement

_LOG_TAIL = 4000
"""Characters of a failing rank's output that are shown."""


@dataclass(frozen=True)
class Comparison:
    """One layout against the reference."""

    layout: str
    processes: int
    loss_difference: float = math.nan
    """Largest over the objectives; nan where the layout gave no result."""
    worst_gradient: str = ""
    gradient_difference: float = math.nan
    seconds: float = 0.0
    problem: str = ""
    """Why there is no result: a skipped layout's reason, a failed one's output."""
    skipped: bool = False

    def passes(self, tolerance: float) -> bool:
        """Whether both differences are within the tolerance (a skipped layout passes)."""
        return self.skipped or max(self.loss_difference, self.gradient_difference, key=_nan_last) <= tolerance


def _nan_last(value: float) -> float:
    return math.inf if math.isnan(value) else value


def run(
    *, layouts: Sequence[str] = (), tolerance: float = 1e-5, timeout_s: float = 300.0, model: str | None = None
) -> int:
    """Runs the check and prints its table.

    Args:
        layouts: Names, see parse_layout; empty = those of DEFAULT_LAYOUTS that the model can be laid out on.
        tolerance: Largest relative difference that passes.
        timeout_s: Bound of each layout, in seconds.
        model: As model.path in the configuration; None = a tiny Mixtral made for the check.

    Returns:
        0 when every layout passes, else 1.

    Raises:
        ValueError: A layout name or the model is wrong, or the model cannot be laid out on a layout asked for.
    """
    shape = model_shape(_architecture(model))
    for name in layouts:
        fit(parse_layout(name), shape)
    options = dict(layouts=list(layouts), tolerance=tolerance, timeout_s=timeout_s, model=model)
    process = subprocess.Popen(
        [sys.executable, "-m", "grpo_mc.megatron.parity", json.dumps(options)],
        env=_environment(),
        start_new_session=True,
    )
    try:
        return 1 if process.wait() else 0  # also when a signal ended it
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _environment() -> dict[str, str]:
    """One thread a rank, no GPU, gloo on the loopback interface, and this package importable from where it is."""
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    package_parent = str(Path(__file__).resolve().parents[2])
    search = [package_parent, *filter(None, [os.environ.get("PYTHONPATH")])]
    loopback = {} if "GLOO_SOCKET_IFNAME" in environment else {"GLOO_SOCKET_IFNAME": "lo"}
    return {**environment, **loopback, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": os.pathsep.join(search)}  # fmt: skip


def _architecture(model: str | None) -> ModelArchitecture:
    if model is None:
        return TINY_MIXTRAL
    from grpo_mc.megatron.hf_checkpoint import open_checkpoint

    return open_checkpoint(model).architecture


def check(layouts: Sequence[str], tolerance: float, timeout_s: float, model: str | None) -> int:
    """The body of `run`, in the clean process."""
    from rich.console import Console

    warnings.filterwarnings("ignore", message=".*(Transformer Engine|Apex)", category=UserWarning)
    from grpo_mc.megatron import parity_rank  # noqa: F401 - imported before the ranks are forked, once for all

    console, shape = Console(), model_shape(_architecture(model))
    if not console.is_terminal:
        console.width = 120
    comparisons: list[Comparison] = []
    with tempfile.TemporaryDirectory(prefix="grpo_mc_parity_") as folder:
        with console.status("reference"):
            reference = measure(fit(parse_layout(REFERENCE), shape), model, Path(folder), timeout_s)
        if isinstance(reference, str):
            console.print(f"check parity: the reference failed\n{reference}", markup=False)
            return 1
        for name in layouts or DEFAULT_LAYOUTS:
            layout = parse_layout(name)
            try:
                layout = fit(layout, shape)
            except ConfigError as error:
                comparisons.append(Comparison(name, layout.processes, problem=str(error), skipped=True))
                continue
            with console.status(f"{name} on {layout.processes} processes"):
                start = time.monotonic()
                measured = measure(layout, model, Path(folder), timeout_s)
                comparisons.append(compare(layout, measured, reference, time.monotonic() - start))
    _print(console, comparisons, tolerance)
    return 0 if all(comparison.passes(tolerance) for comparison in comparisons) else 1


def measure(layout: ParityLayout, model: str | None, folder: Path, timeout_s: float) -> Measurement | str:
    """Forks a layout's ranks and waits for them; none is left when it returns. The reference has to be measured first.

    Returns:
        Rank 0's measurement, or what went wrong: the failing rank's output.
    """
    context = multiprocessing.get_context("fork")
    mine = Path(tempfile.mkdtemp(dir=folder))
    ranks = [context.Process(target=_rank_main, args=(layout, model, rank, mine, timeout_s))
             for rank in range(layout.processes)]  # fmt: skip
    try:
        for process in ranks:
            process.start()
        problem = _wait(ranks, time.monotonic() + timeout_s, mine)
    finally:
        for process in ranks:
            if process.pid is not None:
                process.kill()
                process.join()
    if problem:
        return problem
    from grpo_mc.megatron.parity_rank import Measurement

    result = Measurement.read(mine / "result")
    if layout.name == REFERENCE:
        (mine / "result").rename(folder / REFERENCE)  # the other layouts' ranks read it
    return result


def _rank_main(layout: ParityLayout, model: str | None, rank: int, folder: Path, timeout_s: float) -> None:
    """A forked rank: its output goes to a file of its own, its result (rank 0's) to another."""
    log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.dump_traceback_later(0.9 * timeout_s)  # shows where a rank hangs, just before it is ended
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(layout.processes), LOCAL_RANK=str(rank))
    from grpo_mc.megatron.parity_rank import measure_layout

    status = 1
    try:
        result = measure_layout(layout, model, rank, folder / "store", folder.parent / REFERENCE, timeout_s)
        if rank == 0:
            result.write(folder / "result")
        status = 0
    # The process boundary: whatever it was, the launcher shows it.
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _wait(ranks: Sequence[BaseProcess], deadline: float, folder: Path) -> str:
    """Waits until all ranks ended well (""), or one failed or time ran out (what happened, with the rank's output)."""
    while True:
        codes = [process.exitcode for process in ranks]
        failed = [rank for rank, code in enumerate(codes) if code not in (None, 0)]
        if failed:
            return f"rank {failed[0]} ended with status {codes[failed[0]]}\n{_tail(folder, failed[0])}"
        running = [rank for rank, code in enumerate(codes) if code is None]
        if not running:
            return ""
        if time.monotonic() > deadline:
            return f"ranks {running} still ran at the time bound\n{_tail(folder, running[0])}"
        time.sleep(0.02)


def _tail(folder: Path, rank: int) -> str:
    log = folder / f"rank{rank}.log"
    return log.read_text(errors="replace")[-_LOG_TAIL:] if log.exists() else ""


def compare(layout: ParityLayout, measured: Measurement | str, reference: Measurement, seconds: float) -> Comparison:
    """One layout's measurement (or failure) against the reference."""
    if isinstance(measured, str):
        return Comparison(layout.name, layout.processes, seconds=seconds, problem=measured)
    losses = [abs(measured.losses[name] - loss) / abs(loss) for name, loss in reference.losses.items()]
    name, difference = worst_gradient(measured.gradients, reference.gradients)
    replica, apart = measured.replicas
    if apart > difference:
        name, difference = f"copies of {replica}", apart
    return Comparison(
        layout.name, layout.processes, loss_difference=max(losses, key=_nan_last), worst_gradient=name,
        gradient_difference=difference, seconds=seconds,
    )  # fmt: skip


def worst_gradient(gradients: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> tuple[str, float]:
    """The name with the largest relative difference, and that difference; inf for a gradient that is not there."""
    worst = ("", 0.0)
    for name in reference.keys() | gradients.keys():
        difference = math.inf
        if name in gradients and name in reference:
            wanted = reference[name].double()
            apart, size = float((gradients[name].double() - wanted).norm()), float(wanted.norm())
            difference = 0.0 if apart == 0 else _nan_last(apart / size if size else math.inf)
        if difference >= worst[1]:
            worst = (name, difference)
    return worst


def _print(console: Any, comparisons: Sequence[Comparison], tolerance: float) -> None:
    from rich.table import Table

    table = Table(
        title=f"relative differences from {REFERENCE} sequences in one process, tolerance {tolerance:g}",
        title_justify="left",
    )
    for heading in ("layout", "processes", "loss", "gradients", "worst gradient", "seconds", "ok"):
        is_text = heading in ("layout", "worst gradient", "ok")
        table.add_column(heading, justify="left" if is_text else "right", overflow="fold")
    for row in comparisons:
        ok = "skipped" if row.skipped else "yes" if row.passes(tolerance) else "NO"
        figures = ["-", "-", "-"] if math.isnan(row.loss_difference) else [
            f"{row.loss_difference:.1e}", f"{row.gradient_difference:.1e}", row.worst_gradient]  # fmt: skip
        table.add_row(row.layout, str(row.processes), *figures, f"{row.seconds:.1f}", ok)
    console.print(table)
    for row in comparisons:
        if row.problem:
            console.print(f"{row.layout}: {row.problem}", markup=False, highlight=False)


def main() -> int:
    """The clean process: options as one JSON argument."""
    return check(**json.loads(sys.argv[1]))


if __name__ == "__main__":
    sys.exit(main())
