"""One run at a time in a run directory.

The process that writes the directory (rank 0) holds an flock on run.lock for as long as the run lives; the kernel drops
it when the process dies, so a run that was killed can be resumed at once. Only the lock counts, never the file, which
stays: it names the process that holds the lock, for whom it turns away, and is empty after an orderly end.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
from contextlib import suppress
from pathlib import Path

from grpo_mc.data.file_lock import try_lock
from grpo_mc.monitor.run_files import LOCK_FILE

_log = logging.getLogger(__name__)
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


class RunLock:
    """The right to write a run directory, from construction to `release`."""

    def __init__(self, run_dir: Path) -> None:
        """Takes the lock. A file system without locks is warned of, and the run goes on without.

        Args:
            run_dir: exists.

        Raises:
            ValueError: another process has the directory in use.
        """
        self._file = (run_dir / LOCK_FILE).open("a+", encoding="utf-8")
        try:
            self._take(run_dir)
        except BaseException as error:
            with suppress(OSError):  # what could not be written is tried once more
                self._file.close()
            if isinstance(error, OSError):
                raise OSError(error.errno, error.strerror, str(run_dir / LOCK_FILE)) from error
            raise

    def release(self) -> None:
        """Gives the directory free; may be called twice."""
        if not self._file.closed:
            self._file.truncate(0)
            self._file.close()

    def _take(self, run_dir: Path) -> None:
        try:
            is_ours = try_lock(self._file)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            _log.warning(
                "run.dir %s is on a file system without locks (%s): nothing keeps a second run out of it",
                run_dir,
                error.strerror,
            )
            return
        if not is_ours:
            raise ValueError(
                f"train: run.dir {run_dir} is in use by {self._holder()}; wait until that run ends or stop it"
                " (SIGTERM lets it save), or give another run.dir"
            )
        self._file.truncate(0)
        self._file.write(f"{os.getpid()} {socket.gethostname()}\n")
        self._file.flush()

    def _holder(self) -> str:
        self._file.seek(0)
        pid, _, host = self._file.read().strip().partition(" ")
        return f"process {pid} on {host}" if host else "another process"
