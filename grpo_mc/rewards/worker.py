"""The program of a reward worker process: build the functions, then judge what arrives until the connection closes.

Protocol, all over one socket (grpo_mc.rewards.channel):
    pool -> worker   pickle: list of reward options; later, lists of (ticket, first function, Sample)
    worker -> pool   JSON: ["started", process id]; ["building", function in words] for each function; ["ready"] or
                     ["failed", is_user_error, text]; later, one [ticket, function, status, score, reason, seconds] for
                     each function of each sample, in order

Every verdict is sent as it is reached: the pool then knows which call is running, for how long, and loses nothing that
was finished when it has to end this process.

The lifeline is a pipe that only the pool's process holds open for writing. When that process ends, however it ends,
the kernel itself kills this process and its process group: no thread or handler of ours could run while a reward
function holds the interpreter lock inside one long arithmetic operation. grpo_mc.rewards.supervisor, this process's
parent, ends what is in other groups.
"""

from __future__ import annotations

import fcntl
import json
import os
import pickle
import signal
import socket
import sys
import traceback
from typing import Any

from grpo_mc.rewards.channel import Channel, ChannelClosed
from grpo_mc.rewards.judge import run_scorer
from grpo_mc.rewards.registry import NamedScorer, build_functions, describe_function

_PARENT_CHECK_S = 5.0


def main(socket_fd: int, lifeline_fd: int) -> None:
    """Run until the pool closes the connection. The process must lead a process group of its own."""
    os.set_inheritable(socket_fd, False)
    os.set_inheritable(lifeline_fd, False)
    _arm_lifeline(lifeline_fd)
    channel = Channel(socket.socket(fileno=socket_fd))
    parent = os.getppid()
    try:
        _tell(channel, "started", os.getpid())
        functions = _start(channel, parent)
        while functions is not None:
            for message in _receive(channel, parent):
                _judge(channel, functions, pickle.loads(message))
    except ChannelClosed:
        pass
    sys.stderr.flush()


def _arm_lifeline(fd: int) -> None:
    """Have the kernel kill this process group when the other end of the pipe closes."""
    if sys.platform != "linux":
        return  # elsewhere a busy worker ends when it next looks at its connection
    fcntl.fcntl(fd, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(fd, fcntl.F_SETSIG, int(signal.SIGKILL))
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)


def _start(channel: Channel, parent: int) -> list[NamedScorer] | None:
    """Build the functions and report; None when they cannot be built."""
    (options,) = _receive(channel, parent)
    functions: list[NamedScorer] = []
    try:
        for function in pickle.loads(options):
            # Said beforehand: building may import a file that ends this process or never returns.
            _tell(channel, "building", describe_function(function))
            functions += build_functions([function])
    except (Exception, SystemExit) as error:  # the boundary to code of others: the pool raises it again
        is_user_error = isinstance(error, ValueError)
        text = str(error) if is_user_error else traceback.format_exc()
        _tell(channel, "failed", is_user_error, text)
        return None
    _tell(channel, "ready")
    return functions


def _tell(channel: Channel, *words: Any) -> None:
    channel.send(json.dumps(words).encode())


def _receive(channel: Channel, parent: int) -> list[bytes]:
    """The next messages. Ends the wait when the pool's process is gone, even if a fork of it kept the socket open."""
    while True:
        messages = channel.receive(_PARENT_CHECK_S)
        if messages:
            return messages
        if os.getppid() != parent:
            raise ChannelClosed("the pool's process is gone")


def _judge(channel: Channel, functions: list[NamedScorer], tasks: list[tuple[int, int, Any]]) -> None:
    for ticket, first, sample in tasks:
        for index in range(first, len(functions)):
            verdict = run_scorer(functions[index], sample)
            _tell(channel, ticket, index, str(verdict.status), verdict.score, verdict.reason, verdict.seconds)
