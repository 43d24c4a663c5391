"""Locks between processes: an flock on an open file, which the kernel drops when its holder dies, however it dies."""

from __future__ import annotations

import fcntl
from typing import IO, Any


def try_lock(file: IO[Any]) -> bool:
    """Takes the exclusive lock on an open file, without waiting; it is held until the file is closed.

    Returns:
        False if another process (or another opening of the file in this one) holds it.

    Raises:
        OSError: the file system has no locks.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
