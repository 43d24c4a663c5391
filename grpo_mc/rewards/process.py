"""The pool's handle on one reward worker: start it, give it samples, end it with everything that it started.

What is started is a supervisor (grpo_mc.rewards.supervisor), which starts the worker and ends with it, the same way.

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

_SUPERVISOR = os.path.join(os.path.dirname(os.path.abspath(__file__)), "supervisor.py")
# From its file, not by its module's name: importing this package first would start what the fork must not find.
_PROGRAM = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); names = {'__name__': 'supervisor'}; "
_PROGRAM += "exec(compile(open(sys.argv[4]).read(), sys.argv[4], 'exec'), names); "
_PROGRAM += "names['main'](int(sys.argv[2]), int(sys.argv[3]))"

SEND_TIMEOUT_S = 30.0
"""Most seconds for an idle worker to take a message; one that does not is ended and replaced."""
_END_TIMEOUT_S = 10.0
"""Most seconds for the supervisor to end what the worker started; then it is killed itself, and the worker with it."""
_EXIT_TIMEOUT_S = 4.0
"""Most seconds from a closed connection to the end of the process: the supervisor kills what is left in between."""


def signal_name(number: int) -> str:
    """ "SIGKILL", "SIGRTMIN+1" or, where the system gives a number that has no name, "signal 77"."""
    try:
        return signal.Signals(number).name
    except ValueError:
        first, last = getattr(signal, "SIGRTMIN", 0), getattr(signal, "SIGRTMAX", -1)
        return f"SIGRTMIN+{number - first}" if first <= number <= last else f"signal {number}"


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
                [sys.executable, "-P", "-c", _PROGRAM, json.dumps(search_path), str(theirs.fileno()), str(lifeline),
                 _SUPERVISOR],
                pass_fds=(theirs.fileno(), lifeline),
                stdin=subprocess.DEVNULL,
                stdout=2,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
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
        self.pid: int | None = None
        """The worker's process id, once it has said so."""
        self.building: str | None = None
        """The function that it builds now, in words, until it is ready."""
        self.tasks: deque[tuple[int, int, Sample]] = deque()
        self.since = time.monotonic()
        """When the worker began what it is doing now: its start, or the call that is running."""
        try:
            self.channel.send(options, SEND_TIMEOUT_S)
        except ChannelClosed:
            pass  # it died at once: the pool finds the connection closed and reports its status

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
        ended = self._wait_for_end(_EXIT_TIMEOUT_S)
        if ended is None:
            return "closed its connection"
        if ended.si_code == os.CLD_EXITED:
            return f"exited with status {ended.si_status}"
        return f"was killed by {signal_name(ended.si_status)}"

    def close(self, grace_s: float = 0.0) -> None:
        """End the process and its children; it may finish by itself for `grace_s` first. Safe to call again."""
        if self.is_closed:
            return
        self.is_closed = True
        self.channel.close()
        self._wait_for_end(grace_s)
        os.close(self._lifeline)  # the kernel kills the worker's group, the supervisor whatever else there is
        if self._wait_for_end(_END_TIMEOUT_S) is None:
            self._process.kill()  # the worker has asked the kernel to be killed with it
        self._process.wait()

    def _wait_for_end(self, timeout_s: float) -> os.waitid_result | None:
        """How the process ended, its status left to be collected; None when it still runs after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while True:
            ended = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None or time.monotonic() >= deadline:
                return ended
            time.sleep(0.005)
