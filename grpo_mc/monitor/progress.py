"""ProgressDisplay: what a person sees while a run is going.

On a terminal one live row (rich): stage, step of total, reward, time left, tokens/s, the clock time of the end. It
never wraps; a narrow terminal shows less of it. Where stdout is no terminal, or on CI, one plain line per step, so that
a log stays readable, and in a long evaluation one every PROGRESS_INTERVAL_S. Only rank 0 shows anything. When nobody
reads it any more (`| head`) it falls silent and the run goes on.

Time left = steps left x the median of the last 20 step durations (the median, because a step with an evaluation or a
checkpoint in it would otherwise move the figure by minutes) + evaluations left x the time of the last one measured.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, TextIO, cast

from grpo_mc.data.text import printable
from grpo_mc.monitor.formats import format_duration, format_number
from grpo_mc.monitor.lossy_stream import LossyStream
from grpo_mc.monitor.metrics import process_rank
from grpo_mc.monitor.run_files import Clock
from grpo_mc.monitor.status_row import Part, StatusRow, bar

NUM_STEPS_IN_MEDIAN = 20
PROGRESS_INTERVAL_S = 10.0
"""Shortest time between two plain lines about the progress of one stage."""
STAGE_WIDTH = 10
"""Of the longest stage names, so that the rest of the row keeps its place."""


def wants_live_display(stream: TextIO | LossyStream, environ: Mapping[str, str]) -> bool:
    """True where a redrawn line makes sense: a terminal that can move its cursor, and not a CI machine."""
    is_ci = environ.get("CI", "").lower() not in ("", "0", "false")
    return stream.isatty() and environ.get("TERM") != "dumb" and not is_ci


class ProgressDisplay:
    """Shows stage, step, reward, tokens/s, time left.

    Args:
        total_steps: steps of the whole run; 0 for work that has no steps, which are not shown then.
        first_step: steps already done (a resumed run).
        evaluate_every: the run evaluates after the last step and, where this is above 0, after every so many steps;
            None = it does not evaluate.
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
        evaluate_every: int | None = None,
        enabled: bool = True,
        rank: int | None = None,
        stream: TextIO | None = None,
        live: bool | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self.total_steps = total_steps
        self.step_done = first_step
        self._stream = LossyStream(stream if stream is not None else sys.stdout)
        self._is_shown = enabled and (process_rank() if rank is None else rank) == 0
        self._is_live = wants_live_display(self._stream, os.environ) if live is None else live
        self._clock = clock
        self._started_at = self._step_started_at = clock()
        self._step_seconds: deque[float] = deque(maxlen=NUM_STEPS_IN_MEDIAN)
        self._stage = "start"
        self._stage_started_at = self._started_at
        self._part_done: tuple[int, int] | None = None
        self._part_printed_at = self._started_at
        self._evaluate_every = evaluate_every
        self._evaluation_s: float | None = None
        self.evaluated_steps: list[int] = []
        """Steps done at each evaluation of this process."""
        self._metrics: dict[str, float] = {}
        self._live_view: Any = None

    @property
    def is_shown(self) -> bool:
        """Whether anything is shown: on rank 0, unless it was switched off."""
        return self._is_shown

    def stage(self, name: str) -> None:
        """Names what the run is doing now ("rollout", "rewards", "training", "evaluation", "checkpoint", ...)."""
        if self._stage == "start":  # what came before, imports and weights, is no part of the first step
            self._step_started_at = self._clock()
        self._stage, self._part_done = name, None
        self._stage_started_at = self._part_printed_at = self._clock()
        self._redraw()

    def progress(self, done: int, total: int) -> None:
        """How much of the stage is done, e.g. of an evaluation's responses; the live row shows it at its next frame."""
        self._part_done = (done, total)
        now = self._clock()
        if self._is_shown and not self._is_live and done < total and now - self._part_printed_at >= PROGRESS_INTERVAL_S:
            self._part_printed_at = now
            self._print(self._stage_text())

    def evaluation_done(self) -> None:
        """Leaves the time since the last step out of the next step's duration (an evaluation or a save is no step)."""
        now = self._clock()
        if self._stage == "evaluation":
            self._evaluation_s = now - self._stage_started_at
        self.evaluated_steps.append(self.step_done)
        self._step_started_at = now

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
            self._live_view.console.print(printable(text), markup=False, highlight=False)
        else:
            self._print(text)

    def seconds_left(self) -> float | None:
        """Estimate for what is left of the run; None before the first finished step of this process.

        An evaluation counts from the first one measured on; saving and the export at the end are left out.
        """
        if not self._step_seconds:
            return None
        steps_s = statistics.median(self._step_seconds) * max(0, self.total_steps - self.step_done)
        each_s = self._evaluation_s or 0.0
        evaluations_s = self._num_evaluations_left() * each_s
        if self._stage == "evaluation" and evaluations_s:
            evaluations_s -= min(each_s, self._clock() - self._stage_started_at)
        return steps_s + evaluations_s

    def _num_evaluations_left(self) -> int:
        """Evaluations that are due after the last one made, in steps up to the last."""
        if self._evaluate_every is None:
            return 0
        made = self.evaluated_steps[-1] if self.evaluated_steps else self.step_done
        if made >= self.total_steps:
            return 0
        every = self._evaluate_every or self.total_steps
        at_steps = self.total_steps // every - made // every
        return at_steps + (self.total_steps % every > 0)

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

        console = Console(file=cast(TextIO, self._stream))
        row = StatusRow(self._parts)
        self._live_view = Live(console=console, refresh_per_second=4, get_renderable=lambda: row)
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

    def _stage_text(self) -> str:
        return self._stage if self._part_done is None else f"{self._stage} {self._part_done[0]}/{self._part_done[1]}"

    def _parts(self) -> list[Part]:
        """The live row, left to right; the numbers are the order in which parts stay when it gets narrow."""
        parts = [Part(printable(self._stage_text()).ljust(STAGE_WIDTH), 0, "bold")]
        if self.total_steps:
            parts.append(Part(bar(self.step_done, self.total_steps), 8))
            parts.append(Part(f"step {self.step_done}/{self.total_steps}", 1))
        keep = {"reward": 2, "rollout tok/s": 4, "train tok/s": 5}
        parts += [Part(f"{label} {value}", keep[label]) for label, value in self._figures()]
        if self.total_steps:
            left = self.seconds_left()
            parts.append(Part(f"left {format_duration(left)}", 3))
            if left is not None:
                parts.append(Part(f"ends {datetime.now() + timedelta(seconds=left):%H:%M}", 6))
        parts.append(Part(f"elapsed {format_duration(self._clock() - self._started_at)}", 7))
        return parts

    def _print(self, text: str) -> None:
        self._stream.write(printable(text) + "\n")
        self._stream.flush()
