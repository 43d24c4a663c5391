"""ProgressDisplay on a terminal, off it, and its time estimates; RunMonitor."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_mc.monitor.progress import ProgressDisplay, wants_live_display
from grpo_mc.monitor.sink import RunMonitor


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class LostReader(io.StringIO):
    """A pipe whose reader goes away after some writes, or a terminal that is closed."""

    def __init__(self, num_writes: int, error: OSError) -> None:
        super().__init__()
        self.num_left = num_writes
        self.error = error

    def write(self, text: str) -> int:
        self.num_left -= 1
        if self.num_left < 0:
            raise self.error
        return super().write(text)


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("error", [BrokenPipeError(32, "Broken pipe"), OSError(5, "Input/output error")])
def test_a_reader_that_goes_away_mutes_the_display_and_ends_nothing(live: bool, error: OSError) -> None:
    """`train ... | head`: the run ended with status 141 and without a checkpoint."""
    stream = LostReader(1, error)
    with ProgressDisplay(3, rank=0, stream=stream, live=live) as display:
        for step in (1, 2, 3):
            display.stage("rollout")
            display.step(step, {"reward/mean": 0.5})
            display.message("a line")
    assert stream.num_left < 0 and display.step_done == 3


def test_a_standard_output_that_was_closed_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", None)
    with ProgressDisplay(1, rank=0) as display:
        display.step(1, {})
        display.message("a line")


def test_messages_show_control_characters_as_escapes() -> None:
    stream = io.StringIO()
    ProgressDisplay(1, rank=0, stream=stream, live=False).message("a\x1b[31m\0")
    assert stream.getvalue() == "a\\x1b[31m\\x00\n"


def test_what_comes_before_the_first_step_is_no_part_of_it() -> None:
    """A resumed run without an evaluation: the first step counted imports and the loading of weights."""
    clock = Clock()
    display = ProgressDisplay(3, rank=0, stream=io.StringIO(), live=False, clock=clock)
    clock.now += 25
    for name in ("rollout", "rewards", "train"):
        display.stage(name)
        clock.now += 1
    display.step(1, {})
    assert display.seconds_left() == pytest.approx(6.0)


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
    for part in ("[training]", "step 3/8", "reward 0.25", "train tok/s 88", "left 2m30s", "ends ", "[b]done[/b]"):
        assert part in text, part
    display.close()


FIGURES = {
    "reward/mean": 0.281234,
    "throughput/rollout_tokens_per_s": 12345.6,
    "throughput/train_tokens_per_s": 54321.0,
}


@pytest.fixture
def busy_display() -> Callable[[int], Any]:
    """busy_display(width): a live display with every figure, drawn on a recording console of that width."""
    displays: list[ProgressDisplay] = []

    def make(width: int) -> Any:
        clock = Clock()
        display = ProgressDisplay(1000, first_step=122, rank=0, stream=Terminal(), live=True, clock=clock)
        displays.append(display)
        display.start()
        console = display._live_view.console
        console.width, console.record = width, True
        clock.now += 3725
        display.step(123, FIGURES)
        display.stage("evaluation")
        display.progress(256, 400)
        return display, console

    yield make
    for display in displays:
        display.close()


@pytest.mark.parametrize("width", [20, 60, 80, 120, 200])
def test_the_live_row_never_wraps(width: int, busy_display: Callable[[int], Any]) -> None:
    """At 80 columns the row took 6 lines and cut the stage to `checkpo...`."""
    display, console = busy_display(width)
    console.export_text()  # what was drawn before
    console.print(display._live_view.get_renderable())
    lines = console.export_text().splitlines()
    assert len(lines) == 1 and len(lines[0]) <= width


@pytest.mark.parametrize(
    ("width", "shown", "left_out"),
    [
        (20, ["evaluation 256/400"], ["step"]),
        (60, ["evaluation 256/400", "step 123/1000", "reward 0.2812"], ["left", "tok/s"]),
        (80, ["evaluation 256/400", "step 123/1000", "reward 0.2812", "left 37d"], ["tok/s", "elapsed"]),
        (120, ["left 37d", "rollout tok/s 12,346", "train tok/s 54,321"], ["elapsed", "["]),
        (200, ["train tok/s 54,321", "left 37d", "ends ", "elapsed 1h02m", "[##------------------]"], []),
    ],
)
def test_the_less_room_the_less_the_row_shows(
    width: int, shown: list[str], left_out: list[str], busy_display: Callable[[int], Any]
) -> None:
    display, _ = busy_display(width)
    row = display._live_view.get_renderable().text(width).plain
    assert all(part in row for part in shown), row
    assert not any(part in row for part in left_out), row


def test_a_frame_after_a_message_shows_no_markup(busy_display: Callable[[int], Any]) -> None:
    """It showed the literal text [bold]start[/bold]: printing without markup also held for the row below."""
    display, console = busy_display(80)
    display.message("evaluation [b]done[/b]")
    display._live_view.refresh()
    text = console.export_text()
    assert "[b]done[/b]" in text and "evaluation 256/400" in text
    assert "[bold]" not in text


def test_a_long_evaluation_is_told_every_10_seconds_off_a_terminal() -> None:
    stream, clock = io.StringIO(), Clock()
    display = ProgressDisplay(10, rank=0, stream=stream, clock=clock)
    display.stage("evaluation")
    for done in range(0, 401, 25):
        display.progress(done, 400)
        clock.now += 4
    assert stream.getvalue().splitlines() == [f"evaluation {done}/400" for done in (75, 150, 225, 300, 375)]
    display.stage("rollout")
    assert display._stage_text() == "rollout"


def test_a_short_evaluation_is_not_told_off_a_terminal() -> None:
    stream = io.StringIO()
    display = ProgressDisplay(10, rank=0, stream=stream, clock=Clock())
    display.stage("evaluation")
    display.progress(0, 400)
    display.progress(400, 400)
    assert stream.getvalue() == ""


@pytest.mark.parametrize(
    ("every", "left_at"),
    # Steps of 2 s, evaluations of 30 s: at steps 1, 3 and 5 of 5 the steps left and the evaluations still to come.
    [(None, [8, 4, 0]), (0, [8 + 30, 4 + 30, 0 + 30]), (2, [8 + 90, 4 + 60, 0 + 30]), (5, [8 + 30, 4 + 30, 0 + 30])],
)
def test_time_left_holds_the_evaluations_still_to_come(every: int | None, left_at: list[float]) -> None:
    clock = Clock()
    display = ProgressDisplay(5, evaluate_every=every, rank=0, stream=io.StringIO(), clock=clock)

    def evaluate() -> None:
        display.stage("evaluation")
        clock.now += 30
        display.evaluation_done()

    if every is not None:
        evaluate()
    found = []
    for step in range(1, 6):
        display.stage("rollout")
        clock.now += 2
        display.step(step, {})
        found.append(display.seconds_left())
        if every and step % every == 0 and step < 5:
            evaluate()
    assert found[::2] == left_at
    if every is not None:
        display.stage("evaluation")
        clock.now += 12
        assert display.seconds_left() == 30 - 12
        clock.now += 18
        display.evaluation_done()
        assert display.seconds_left() == 0


def test_work_without_steps_shows_none() -> None:
    display = ProgressDisplay(0, rank=0, stream=io.StringIO(), live=False)
    display.stage("evaluation")
    display.progress(3, 8)
    assert [part.text for part in display._parts()] == ["evaluation 3/8", "elapsed 0s"]


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
    assert "evaluation at step 0: accuracy 0.312 +- 0.0232 (n = 400)" in out
    assert out.count("step 1/2  reward 0.5") == 2
    assert "saved" in out
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({}, None), ({"source": "held-out"}, 0), ({"source": "held-out", "every": 5}, 5),
     ({"source": "held-out", "mode": "rollout_only"}, None)],
)  # fmt: skip
def test_the_monitor_knows_whether_an_evaluation_will_follow(
    tmp_path: Path, make_config: Any, changes: dict[str, Any], expected: int | None
) -> None:
    with RunMonitor(tmp_path, make_config(**changes), rank=0) as monitor:
        assert monitor.display._evaluate_every == expected
