"""One run at a time in a run directory."""

from __future__ import annotations

import errno
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from grpo_mc.monitor import run_lock
from grpo_mc.monitor.metrics import MetricsWriter
from grpo_mc.monitor.run_lock import RunLock

HOLDER = """
import fcntl, sys
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
file.write("4321 elsewhere\\n")
file.flush()
print(1, flush=True)
input()
"""


def test_a_second_run_is_turned_away_and_a_kill_of_the_first_frees_the_directory(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-S", "-c", HOLDER, str(tmp_path / "run.lock")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert holder.stdin is not None and holder.stdout is not None
    try:
        assert holder.stdout.readline() == "1\n"
        with pytest.raises(ValueError, match=f"run.dir {tmp_path} is in use by process 4321 on elsewhere; .*another"):
            RunLock(tmp_path)
    finally:
        holder.kill()
        holder.wait(timeout=30)
        holder.stdin.close()
        holder.stdout.close()
    lock = RunLock(tmp_path)
    assert (tmp_path / "run.lock").read_text() == f"{os.getpid()} {socket.gethostname()}\n"
    lock.release()
    lock.release()
    assert (tmp_path / "run.lock").read_text() == ""


@pytest.mark.parametrize("resume", [False, True])
def test_a_writer_holds_the_lock_until_it_is_closed_and_takes_it_before_it_writes(
    tmp_path: Path, make_config: Any, resume: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = MetricsWriter(tmp_path, make_config(), rank=0)
    first.write(1, {})
    monkeypatch.setattr("grpo_mc.monitor.metrics.open_external_writers", lambda *_: pytest.fail("something was opened"))
    with pytest.raises(ValueError, match=f"in use by process {os.getpid()} "):
        MetricsWriter(tmp_path, make_config(resume=resume), rank=0)
    MetricsWriter(tmp_path, make_config(), rank=1).close()
    first.close()
    RunLock(tmp_path).release()


def test_a_refused_start_gives_the_directory_free(run_dir: Path, make_config: Any) -> None:
    with pytest.raises(ValueError, match="already holds") as caught:
        MetricsWriter(run_dir, make_config(), rank=0)
    RunLock(run_dir).release()
    del caught  # its traceback keeps the writer, whose file would be closed with it


def test_a_file_system_without_locks_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(file: object) -> bool:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(run_lock, "try_lock", refuse)
    RunLock(tmp_path).release()
    assert "nothing keeps a second run out" in caplog.text


def test_a_lock_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """What could not be written is written again when the file is closed, which must not hide the name."""
    _, hard = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # no file may grow, as on a full disk
    try:
        with pytest.raises(OSError) as caught:
            RunLock(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.errno == errno.EFBIG
    assert caught.value.filename == str(tmp_path / "run.lock")
