"""A barrier between processes that map one file: microseconds, where one through sockets takes up to a millisecond.

Each rank has a counter in the shared memory, raises it when it arrives and waits for the others'. Each also holds a
lock on a byte of the file, which the kernel drops when the process ends, however it ends: so a waiting rank learns of
a death.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import platform
import time
from typing import IO

STORES_STAY_IN_ORDER = platform.machine() in ("x86_64", "AMD64")
"""Whether what a rank wrote before it raised its counter is seen by whoever sees the counter. Others need fences."""
_CELL = 64  # a cache line for each counter
_WORDS = _CELL // 8
_POLLS = 1000  # with the processor offered to others between them, about a millisecond
_NAP_S = 2e-4
_CHECK_S = 0.5  # between two looks for ranks that ended


def cells_bytes(ranks: int) -> int:
    """Bytes of shared memory that the barrier of so many ranks takes."""
    return ranks * _CELL


class LostRank(RuntimeError):
    """Another rank has ended or does not come."""


class HostBarrier:
    """The barrier of one group of ranks; each makes its own, and all must have made theirs before the first wait."""

    def __init__(
        self, file: IO[bytes], memory: mmap.mmap, offset: int, *, rank: int, ranks: int, timeout_s: float
    ) -> None:
        """
        Args:
            file: The mapped file, open for reading and writing; it must stay the only open one of this process.
            offset: Where cells_bytes(ranks) zeros begin in the memory; a multiple of 64.
            timeout_s: Bound of a wait.
        """
        self._file, self._own, self.timeout_s = file, rank, timeout_s
        self._others = [other for other in range(ranks) if other != rank]
        self._counters = memoryview(memory)[offset : offset + cells_bytes(ranks)].cast("q")
        self._arrivals = 0
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)

    def wait(self) -> None:
        """Returns when every rank has called this as often as this one.

        Raises:
            LostRank: A rank has ended without arriving, or did not arrive within timeout_s.
        """
        self._arrivals += 1
        self._counters[self._own * _WORDS] = self._arrivals
        for _ in range(_POLLS):
            if not self._late():
                return
            os.sched_yield()
        start = time.monotonic()
        next_check = start
        while late := self._late():
            now = time.monotonic()
            if now >= next_check:
                self._check(late, now - start)
                next_check = now + _CHECK_S
            time.sleep(_NAP_S)

    def _late(self) -> list[int]:
        return [rank for rank in self._others if self._counters[rank * _WORDS] < self._arrivals]

    def _check(self, late: list[int], waited_s: float) -> None:
        ended = [rank for rank in late if self._has_ended(rank)]
        if ended := [rank for rank in ended if rank in self._late()]:  # not if it arrived first
            raise LostRank(f"rank {ended[0]} of the group has ended while the others wait for it; see its own message")
        if waited_s > self.timeout_s:
            raise LostRank(
                f"timed out: rank {late[0]} of the group did not arrive within {self.timeout_s:.0f} s;"
                " see what it does, or raise parallel.timeout_s"
            )

    def _has_ended(self, rank: int) -> bool:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        except OSError:
            return False
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, rank)
        return True
