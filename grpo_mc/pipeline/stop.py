"""Stopping on request: SIGTERM (a scheduler's notice) and SIGINT (Ctrl-C) let the step end, save, and exit."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any


class Interrupted(Exception):
    """The run was asked to stop and has saved what it had."""

    def __init__(self, signum: int, message: str) -> None:
        super().__init__(message)
        self.exit_status = 128 + signum
        """What a shell reports for a process that the signal ended."""


class StopRequest:
    """While entered, the first signal sets `signum`; a second Ctrl-C interrupts at once, as Python always does."""

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
            raise KeyboardInterrupt
        self.signum = signum
