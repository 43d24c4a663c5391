"""Stopping on request: SIGTERM (a scheduler's notice) and SIGINT (Ctrl-C) end the run at the next point where it can be
saved: before a step is trained on it is given up, once it is trained on it is finished.
"""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any


class Interrupted(Exception):
    """The run was asked to stop and has kept what it had."""

    def __init__(self, signum: int, message: str) -> None:
        super().__init__(message)
        self.exit_status = 128 + signum
        """What a shell reports for a process that the signal ended."""


class StepAbandoned(Exception):
    """A step was given up before anything was trained on."""


class StopRequest:
    """While entered, the first SIGTERM or SIGINT sets `signum`.

    A second Ctrl-C raises KeyboardInterrupt at once, and a third ends the process as if nothing handled it. Further
    SIGTERMs change nothing: schedulers and launchers send several.
    """

    def __init__(self) -> None:
        self.signum = 0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        for signum in (signal.SIGTERM, signal.SIGINT):
            self._previous[signum] = signal.signal(signum, self._on_signal)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self.signum and signum == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            raise KeyboardInterrupt
        self.signum = self.signum or signum
