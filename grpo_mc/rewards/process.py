"""The pool's handle on one reward worker: start it, give it samples, end it with everything that it started.

The worker is a fresh interpreter, not a fork: a fork of a process with running threads (torch, gloo) can deadlock. It
is started without multiprocessing, whose spawn imports the main program again in the child.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from typing import Any

from grpo_mc.rewards.channel import Channel, ChannelClosed
from grpo_mc.rewards.sample import Sample

_PROGRAM = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from grpo_mc.rewards.worker import main; "
_PROGRAM += "main(int(sys.argv[2]), int(sys.argv[3]))"

SEND_TIMEOUT_S = 30.0
"""Most seconds for an idle worker to take a message; one that does not is ended and replaced."""


class WorkerProcess:
    """One worker. `tasks` are the (ticket, next function, sample) that it has not finished, oldest first."""

    def __init__(self, options: bytes) -> None:
        """Start the process; it is ready when its first message says so. `options` is a pickled list of options."""
        ours, theirs = socket.socketpair()
        lifeline, self._lifeline = os.pipe()
        search_path = [os.path.abspath(p) for p in sys.path] + [os.getcwd()]
        # Neither standard input nor output: a reward function that prints must not mix into the program's own output.
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, json.dumps(search_path), str(theirs.fileno()), str(lifeline)],
                pass_fds=(theirs.fileno(), lifeline),
                stdin=subprocess.DEVNULL,
                stdout=2,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        except OSError:
            ours.close()
            os.close(self._lifeline)
            raise
        finally:
            theirs.close()
            os.close(lifeline)
        self.channel = Channel(ours)
        self.is_ready = False
        self.is_closed = False
        self.tasks: deque[tuple[int, int, Sample]] = deque()
        self.since = time.monotonic()
        """When the worker began what it is doing now: its start, or the call that is running."""
        try:
            self.channel.send(options, SEND_TIMEOUT_S)
        except ChannelClosed:
            pass  # it died at once: the pool finds the connection closed and reports its status

    @property
    def pid(self) -> int:
        """Its process id, which is also its process group."""
        return self._process.pid

    @property
    def is_idle(self) -> bool:
        """Whether it can take samples."""
        return self.is_ready and not self.is_closed and not self.tasks

    def give(self, tasks: list[tuple[int, int, Sample]]) -> None:
        """Hand over samples. Raises ChannelClosed when the worker is gone; they stay in `tasks`."""
        self.tasks.extend(tasks)
        self.channel.send(pickle.dumps(tasks), SEND_TIMEOUT_S)
        self.since = time.monotonic()

    def answers(self) -> list[list[Any]]:
        """The messages that have arrived, without waiting. Raises ChannelClosed after the last one of a dead worker."""
        messages = [json.loads(m) for m in self.channel.receive()]
        if messages:
            self.since = time.monotonic()
        return messages

    def exit_text(self) -> str:
        """How the process ended, in words, waiting a moment for it to do so."""
        ended = self._wait_for_end(1.0)
        if ended is None:
            return "closed its connection"
        if ended.si_code == os.CLD_EXITED:
            return f"exited with status {ended.si_status}"
        return f"was killed by {signal.Signals(ended.si_status).name}"

    def close(self, grace_s: float = 0.0) -> None:
        """End the process and its children; it may finish by itself for `grace_s` first. Safe to call again."""
        if self.is_closed:
            return
        self.is_closed = True
        self.channel.close()
        self._wait_for_end(grace_s)
        try:
            # Before its status is collected, so that the process group's number cannot belong to anyone else.
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()
        os.close(self._lifeline)

    def _wait_for_end(self, timeout_s: float) -> os.waitid_result | None:
        """How the process ended, its status left to be collected; None when it still runs after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while True:
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None or time.monotonic() >= deadline:
                return ended
            time.sleep(0.005)
