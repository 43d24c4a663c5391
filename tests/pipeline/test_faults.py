"""Runs under torchrun that are told to stop, lose a rank, or fail on one rank only: bounded, and nothing is left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from helpers.processes import MARK, free_port, kill_marked, marked_environment
from helpers.runs import BASE, SMOKE, read_lines, run, tiny_config

pytestmark = pytest.mark.dist
START_S, END_S = 180.0, 90.0
"""Bounds of the first step of a launch and of its end; on a quiet machine both take seconds."""


@dataclass
class Launch:
    """A run on two processes under torchrun."""

    process: subprocess.Popen[bytes]
    mark: str
    log: Path
    run_dir: Path

    def wait_for_step(self, step: int) -> None:
        deadline = time.monotonic() + START_S
        while self.steps_done() < step:
            assert self.process.poll() is None, self.output()
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.1)

    def steps_done(self) -> int:
        path = self.run_dir / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        return text.count("\n")

    def ranks(self) -> dict[int, psutil.Process]:
        """The processes that hold a rank."""
        found = {}
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                found[int(child.environ()["RANK"])] = child
        return found

    def wait(self) -> int:
        try:
            return self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {END_S} s\n{self.output()}") from None

    def leftovers(self) -> list[str]:
        """Command lines of processes of this launch that still live, after a moment for the kernel."""
        deadline = time.monotonic() + 5
        while True:
            alive = []
            for process in psutil.process_iter():
                with contextlib.suppress(psutil.Error):
                    if process.pid != os.getpid() and process.environ().get(MARK) == self.mark:
                        alive.append(" ".join(process.cmdline()))
            if not alive or time.monotonic() > deadline:
                return alive
            time.sleep(0.1)

    def output(self) -> str:
        return self.log.read_text(errors="replace")[-6000:]


@pytest.fixture
def launch(model: Path, tmp_path: Path) -> Iterator[Callable[..., Launch]]:
    """`launch("--resume", dir, ...)`: starts `train` on two processes; what is left at the end is killed."""
    started: list[Launch] = []

    def start(run_dir: Path, *arguments: str | Path) -> Launch:
        mark, log = uuid.uuid4().hex, tmp_path / f"launch{len(started)}.log"
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", "2", "--rdzv-backend",
            "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "-m", "grpo_mc", "train", *map(str, arguments),
        ]  # fmt: skip
        with log.open("wb") as stream:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True,
                env=marked_environment(mark),
            )  # fmt: skip
        started.append(Launch(process, mark, log, run_dir))
        return started[-1]

    yield start
    for each in started:
        kill_marked(each.mark)
        each.process.wait()


def fresh(model: Path, run_dir: Path, *overrides: str) -> list[str | Path]:
    """Arguments of a run without end."""
    return [SMOKE, f"model.path={model}", f"run.dir={run_dir}", *BASE, "run.steps=100000", *overrides]


def test_a_second_launch_into_one_run_directory_ends_and_the_first_goes_on(
    launch: Callable[..., Launch], model: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    first = launch(run_dir, *fresh(model, run_dir))
    first.wait_for_step(1)
    second = launch(run_dir, "--resume", run_dir)
    assert second.wait() != 0
    assert second.leftovers() == []
    assert f"is in use by process {first.ranks()[0].pid} on " in second.output(), second.output()
    first.wait_for_step(first.steps_done() + 1)
    steps = [line["step"] for line in read_lines(run_dir / "metrics.jsonl")]
    assert steps == list(range(1, len(steps) + 1))


def test_sigterm_to_the_launcher_saves_and_a_killed_rank_ends_the_resumed_run(
    launch: Callable[..., Launch], model: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    first = launch(run_dir, *fresh(model, run_dir))
    first.wait_for_step(1)
    first.process.send_signal(signal.SIGTERM)
    assert first.wait() != 0
    assert first.leftovers() == []
    assert "stopped by SIGTERM after step" in first.output(), first.output()
    assert first.output().count("stopped by SIGTERM") == 1, "one rank says it for all"
    saved = first.steps_done()
    assert (run_dir / f"checkpoints/step_{saved}/COMPLETE").is_file()

    second = launch(run_dir, "--resume", run_dir)
    second.wait_for_step(saved + 1)
    second.ranks()[1].kill()
    assert second.wait() != 0
    assert second.leftovers() == []

    # What a killed run leaves goes on, here on another layout.
    steps = max(saved, second.steps_done()) + 1
    result, sink = run(tiny_config(model, run_dir, f"run.steps={steps}"), resume=True)
    assert result.steps == steps and sink.metrics[0]["step"] == saved + 1


@pytest.mark.slow
def test_a_failure_on_rank_0_alone_ends_all_ranks(launch: Callable[..., Launch], model: Path, tmp_path: Path) -> None:
    """Rank 0 cannot write its rollouts, while the others wait for it in the next collective."""
    run_dir = tmp_path / "run"
    started = launch(run_dir, *fresh(model, run_dir))
    started.wait_for_step(1)
    (run_dir / "rollouts").rename(run_dir / "moved")
    (run_dir / "rollouts").write_text("no folder")
    assert started.wait() != 0
    assert started.leftovers() == []
    assert "write rollouts: " in started.output(), started.output()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_ctrl_c_reaches_every_rank_and_saves(
    launch: Callable[..., Launch], model: Path, tmp_path: Path, rank: int
) -> None:
    """A terminal sends SIGINT to the launcher and to every rank; a rank that gets it first waits for the others."""
    run_dir = tmp_path / "run"
    started = launch(run_dir, *fresh(model, run_dir))
    started.wait_for_step(1)
    started.ranks()[rank].send_signal(signal.SIGINT)
    time.sleep(0.2)
    started.process.send_signal(signal.SIGINT)
    assert started.wait() != 0
    assert started.leftovers() == []
    assert (run_dir / f"checkpoints/step_{len(read_lines(run_dir / 'metrics.jsonl'))}/COMPLETE").is_file()
