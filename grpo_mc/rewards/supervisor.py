"""The process between the pool and one reward worker: it ends everything that the worker started, however it ends.

A reward function may start programs in sessions of their own, which no signal to a process group reaches. This process
is their subreaper (Linux): whatever loses its parent below it becomes its child, so at the end nothing is out of sight.

    pool -> supervisor -> worker -> what the reward functions start
    the worker ends              the rest is killed, then this process ends the way the worker did
    the pool closes the lifeline, or its process is gone
                                 the worker and the rest are killed

It is run from its file before anything of this package is imported, so that the fork happens in a small process with
one thread; it uses the standard library alone.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import sys
import time

KILL_BOUND_S = 2.0
"""Most seconds spent on ending what the worker left; what cannot be killed (another user's) is left alone then."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def main(socket_fd: int, lifeline_fd: int) -> None:
    """Start the worker, wait for its end or the pool's, end all of its descendants, and end as the worker did."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    wakeup, signalled = os.pipe()
    os.set_blocking(signalled, False)
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(signalled, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # only so that it is written to the pipe
    supervisor = os.getpid()
    worker = os.fork()
    if worker == 0:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.close(wakeup)
        os.close(signalled)
        os.setsid()
        _prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != supervisor:
            return  # it died before the line above could tie us to it
        from grpo_mc.rewards.worker import main as run_worker

        return run_worker(socket_fd, lifeline_fd)
    os.close(socket_fd)  # the pool sees the connection close when the worker's end of it does
    status = _wait(worker, lifeline_fd, wakeup)
    _end_descendants(worker)
    _end_like(status)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _wait(worker: int, lifeline_fd: int, wakeup: int) -> int | None:
    """The worker's wait status; None when the pool is done with it first. Orphans that end meanwhile are reaped."""
    poll = select.poll()
    poll.register(lifeline_fd, select.POLLIN)
    poll.register(wakeup, select.POLLIN)
    while True:
        ready = [fd for fd, _ in poll.poll()]
        if wakeup in ready:
            os.read(wakeup, 4096)
            ended = _reap()
            if worker in ended:
                return ended[worker]
        if lifeline_fd in ready:
            return None


def _reap() -> dict[int, int]:
    """The wait status of every child that has ended. Raises ChildProcessError when there is no child left at all."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            if ended:
                return ended
            raise
        if pid == 0:
            return ended
        ended[pid] = status


def _end_descendants(worker: int) -> None:
    """Kill until no child is left: what a killed process leaves behind becomes a child of this one."""
    deadline = time.monotonic() + KILL_BOUND_S
    try:
        os.killpg(worker, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
    while time.monotonic() < deadline:
        try:
            _reap()
        except ChildProcessError:
            return
        for pid in _descendants(os.getpid()):
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass
        time.sleep(0.002)


def _descendants(root: int) -> list[int]:
    """The process ids below `root`, from /proc; none where there is no /proc."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc") if os.path.isdir("/proc") else []:
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:
                continue  # it has just ended
            if len(fields) > 1:
                children.setdefault(int(fields[1]), []).append(int(entry))
    found: list[int] = []
    queue = [root]
    while queue:
        below = children.pop(queue.pop(), [])
        found += below
        queue += below
    return found


def _end_like(status: int | None) -> None:
    """End this process with the exit status or the signal that ended the worker."""
    if status is None:
        os._exit(0)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core of this process would tell nothing
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
