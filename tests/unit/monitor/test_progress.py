"""ProgressDisplay on a terminal, off it, and its time estimates; RunMonitor."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import pytest

from grpo_mc.monitor.progress import ProgressDisplay, format_duration, format_number, wants_live_display
from grpo_mc.monitor.sink import RunMonitor, evaluation_line


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (59.4, "59s"), (59.6, "1m00s"), (725, "12m05s"), (11220, "3h07m"), (187200, "2d04h"),
     (-3, "0s"), (None, "-"), (math.nan, "-"), (math.inf, "-")],
)  # fmt: skip
def test_durations(seconds: float | None, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.123456, "0.1235"), (999.9, "999.9"), (12345.6, "12,346"), (1.5e-5, "1.5e-05"), (3e12, "3e+12"),
     (math.nan, "nan"), (-math.inf, "-inf"), (None, "-")],
)  # fmt: skip
def test_numbers(value: float | None, text: str) -> None:
    assert format_number(value) == text


def test_one_plain_line_per_step_off_a_terminal() -> None:
    stream, clock = io.StringIO(), Clock()
    with ProgressDisplay(10, rank=0, stream=stream, clock=clock) as display:
        display.stage("rollout")
        clock.now += 4
        display.step(1, {"reward/mean": 0.5, "throughput/rollout_tokens_per_s": 321.4})
        clock.now += 2
        display.step(2, {"reward/mean": math.nan})
    assert stream.getvalue().splitlines() == [
        "step  1/10  reward 0.5  rollout tok/s 321.4  4 s/step  left 36s",
        "step  2/10  reward nan  2 s/step  left 24s",
    ]


def test_time_left_is_by_the_median_so_that_one_slow_step_does_not_move_it() -> None:
    clock = Clock()
    display = ProgressDisplay(100, rank=0, stream=io.StringIO(), clock=clock)
    assert display.seconds_left() is None
    for step, seconds in enumerate([2, 2, 300, 2, 2], start=1):
        clock.now += seconds
        display.step(step, {})
    assert display.seconds_left() == 2 * 95


def test_an_evaluation_is_not_counted_as_step_time() -> None:
    clock = Clock()
    display = ProgressDisplay(10, rank=0, stream=io.StringIO(), clock=clock)
    clock.now += 60
    display.evaluation_done()
    clock.now += 3
    display.step(1, {})
    assert display.seconds_left() == 27


def test_other_ranks_and_a_disabled_display_are_silent() -> None:
    for options in ({"rank": 1}, {"rank": 0, "enabled": False}):
        for live in (True, False):
            stream = Terminal()
            with ProgressDisplay(2, stream=stream, live=live, **options) as display:  # type: ignore[arg-type]
                display.stage("rollout")
                display.step(1, {"reward/mean": 1.0})
                display.message("hello")
            assert stream.getvalue() == ""


def test_the_live_line_shows_stage_step_reward_speed_and_time_left() -> None:
    stream, clock = Terminal(), Clock()
    with ProgressDisplay(8, rank=0, stream=stream, live=True, clock=clock) as display:
        display._live_view.console.width = 200
        clock.now += 30
        display.step(3, {"reward/mean": 0.25, "throughput/train_tokens_per_s": 88.0})
        display.stage("[training]")
        display.message("evaluation [b]done[/b]")
    text = stream.getvalue()
    for part in ("[training]", "step 3/8", "reward 0.25", "train tok/s 88", "left 2m30s (ends ", "[b]done[/b]"):
        assert part in text, part
    display.close()


@pytest.mark.parametrize(
    ("is_terminal", "environ", "expected"),
    [
        (True, {}, True),
        (True, {"CI": "false"}, True),
        (True, {"CI": "true"}, False),
        (True, {"CI": "1"}, False),
        (True, {"TERM": "dumb"}, False),
        (False, {}, False),
    ],
)
def test_when_the_display_is_live(is_terminal: bool, environ: dict[str, str], expected: bool) -> None:
    assert wants_live_display(Terminal() if is_terminal else io.StringIO(), environ) is expected


def test_run_monitor_fans_out(tmp_path: Path, make_config: Any, make_group: Any, capsys: Any) -> None:
    with RunMonitor(tmp_path, make_config(steps=2), rank=0) as monitor:
        monitor.evaluation(0, {"accuracy": 0.3125, "stderr": 0.02318, "n": 400})
        monitor.stage("rollout")
        monitor.step(1, {"reward/mean": 0.5})
        monitor.samples(1, [make_group(0, [1.0, 0.0])])
        monitor.resume(0)
        monitor.step(1, {"reward/mean": 0.5})
        monitor.message("saved")
    out = capsys.readouterr().out
    assert "evaluation at step 0: accuracy 0.3125 +- 0.02318 (n = 400)" in out
    assert out.count("step 1/2  reward 0.5") == 2
    assert "saved" in out
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1


def test_an_evaluation_without_known_figures_is_shown_as_it_is() -> None:
    assert evaluation_line(3, {"score": 1}) == "evaluation at step 3: {'score': 1}"
    assert evaluation_line(3, {"reward_mean": 0.5}) == "evaluation at step 3: reward_mean 0.5"
