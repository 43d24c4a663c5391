"""ProgressDisplay: what a person sees while a run is going.

On a terminal a live line (rich): stage, step of total, reward, tokens/s, time left and the clock time of the end.
Where stdout is no terminal, or on CI, one plain line per step, so that a log stays readable. Only rank 0 shows
anything.

Time left = steps left x the median of the last 20 step durations (the median, because a step with an evaluation or a
checkpoint in it would otherwise move the figure by minutes).
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, TextIO

from grpo_mc.monitor.metrics import process_rank
from grpo_mc.monitor.run_files import Clock

if TYPE_CHECKING:
    from rich.table import Table

NUM_STEPS_IN_MEDIAN = 20


def format_duration(seconds: float | None) -> str:
    """ "45s", "12m05s", "3h07m", "2d04h"; "-" for None or a value that is not finite."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    total = max(0, round(seconds))
    if total < 60:
        return f"{total}s"
    if total < 3600:
        return f"{total // 60}m{total % 60:02d}s"
    if total < 86400:
        return f"{total // 3600}h{total % 3600 // 60:02d}m"
    return f"{total // 86400}d{total % 86400 // 3600:02d}h"


def format_number(value: float | None) -> str:
    """Four significant digits, thousands grouped; "-" for None, "nan" and "inf" as they are."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(value)
    if value == 0 or 1e-3 <= abs(value) < 1000:
        return f"{value:.4g}"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.3g}"


def wants_live_display(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """True where a redrawn line makes sense: a terminal that can move its cursor, and not a CI machine."""
    is_ci = environ.get("CI", "").lower() not in ("", "0", "false")
    return stream.isatty() and environ.get("TERM") != "dumb" and not is_ci


class ProgressDisplay:
    """Shows stage, step, reward, tokens/s, time left.

    Args:
        total_steps: steps of the whole run.
        first_step: steps already done (a resumed run).
        enabled: false shows nothing (`monitor.progress`).
        rank: default RANK of the environment; only 0 shows.
        stream: default sys.stdout.
        live: redraw in place; default `wants_live_display`.
        clock: seconds; for tests.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        first_step: int = 0,
        enabled: bool = True,
        rank: int | None = None,
        stream: TextIO | None = None,
        live: bool | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self.total_steps = total_steps
        self.step_done = first_step
        self._stream = stream if stream is not None else sys.stdout
        self._is_shown = enabled and (process_rank() if rank is None else rank) == 0
        self._is_live = wants_live_display(self._stream, os.environ) if live is None else live
        self._clock = clock
        self._started_at = self._step_started_at = clock()
        self._step_seconds: deque[float] = deque(maxlen=NUM_STEPS_IN_MEDIAN)
        self._stage = "start"
        self._metrics: dict[str, float] = {}
        self._live_view: Any = None

    def stage(self, name: str) -> None:
        """Names what the run is doing now ("rollout", "rewards", "training", "evaluation", "checkpoint", ...)."""
        self._stage = name
        self._redraw()

    def evaluation_done(self) -> None:
        """Leaves the time since the last step out of the next step's duration (an evaluation or a save is no step)."""
        self._step_started_at = self._clock()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Counts a finished step and shows its figures. `metrics` may lack any of them."""
        now = self._clock()
        self._step_seconds.append(now - self._step_started_at)
        self._step_started_at = now
        self.step_done = step
        self._metrics = dict(metrics)
        if self._is_shown and not self._is_live:
            self._print(self.plain_line())
        self._redraw()

    def message(self, text: str) -> None:
        """Prints a line above the display (a warning, an evaluation's result)."""
        if not self._is_shown:
            return
        if self._live_view is not None:
            self._live_view.console.print(text, markup=False, highlight=False)
        else:
            self._print(text)

    def seconds_left(self) -> float | None:
        """Estimate for the steps left; None before the first finished step of this process."""
        if not self._step_seconds:
            return None
        return statistics.median(self._step_seconds) * max(0, self.total_steps - self.step_done)

    def plain_line(self) -> str:
        """The figures of the last finished step as one line of text."""
        last_s = format_number(self._step_seconds[-1]) if self._step_seconds else "-"
        width = len(str(self.total_steps))
        parts = [f"step {self.step_done:>{width}}/{self.total_steps}"]
        parts += [f"{label} {value}" for label, value in self._figures()]
        return "  ".join([*parts, f"{last_s} s/step", f"left {format_duration(self.seconds_left())}"])

    def start(self) -> None:
        """Starts the live view where there is one."""
        if not (self._is_shown and self._is_live) or self._live_view is not None:
            return
        from rich.console import Console
        from rich.live import Live

        console = Console(file=self._stream)
        self._live_view = Live(self._render(), console=console, refresh_per_second=4, get_renderable=self._render)
        self._live_view.start()

    def close(self) -> None:
        """Stops the live view, leaving its last state on the screen; may be called twice."""
        if self._live_view is not None:
            self._live_view.stop()
            self._live_view = None

    def __enter__(self) -> ProgressDisplay:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _figures(self) -> list[tuple[str, str]]:
        names = {
            "reward": "reward/mean",
            "rollout tok/s": "throughput/rollout_tokens_per_s",
            "train tok/s": "throughput/train_tokens_per_s",
        }
        return [(label, format_number(self._metrics[name])) for label, name in names.items() if name in self._metrics]

    def _redraw(self) -> None:
        if self._live_view is not None:
            self._live_view.refresh()

    def _render(self) -> Table:
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        left = self.seconds_left()
        end = (datetime.now() + timedelta(seconds=left)).strftime("%H:%M") if left is not None else "-"
        elapsed = format_duration(self._clock() - self._started_at)
        table = Table.grid(padding=(0, 2))
        table.add_row(
            f"[bold]{self._stage}[/bold]",
            ProgressBar(total=max(1, self.total_steps), completed=self.step_done, width=20),
            f"step {self.step_done}/{self.total_steps}",
            *[f"{label} {value}" for label, value in self._figures()],
            f"elapsed {elapsed}",
            f"left {format_duration(left)} (ends {end})",
        )
        return table

    def _print(self, text: str) -> None:
        print(text, file=self._stream, flush=True)
