"""A stream for what only a person reads: when its reader goes away it falls silent, and the run goes on.

`grpo-mc train ... | head` closes the pipe after ten lines, a closed terminal fails with EIO, a full disk behind `>`
with ENOSPC. None of them is a reason to lose hours of training.
"""

from __future__ import annotations

import os
import sys
from typing import TextIO


class LossyStream:
    """What `print` and rich need of a text stream. The stream may be None, as sys.stdout is when it was closed."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self.is_lost = stream is None
        """Whether nothing is written any more."""

    def write(self, text: str) -> int:
        if self._stream is not None and not self.is_lost:
            try:
                self._stream.write(text)
            except OSError:
                self._lose()
        return len(text)

    def flush(self) -> None:
        if self._stream is not None and not self.is_lost:
            try:
                self._stream.flush()
            except OSError:
                self._lose()

    def isatty(self) -> bool:
        return self._stream is not None and not self.is_lost and self._stream.isatty()

    def fileno(self) -> int:
        if self._stream is None:
            raise OSError("the stream is closed")  # what io raises for a stream without a file
        return self._stream.fileno()

    @property
    def encoding(self) -> str:
        return getattr(self._stream, "encoding", None) or "utf-8"

    def _lose(self) -> None:
        self.is_lost = True
        if self._stream in (sys.stdout, sys.stderr) and self._stream is not None:
            # What is left in its buffer would fail once more when the interpreter ends, and change the exit status.
            redirect_to_nowhere(self._stream)


def redirect_to_nowhere(stream: TextIO) -> None:
    """Lets everything that is still written to the stream vanish; nothing happens to a stream without a file."""
    try:
        number = stream.fileno()
    except (OSError, ValueError):
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, number)
    os.close(nowhere)
