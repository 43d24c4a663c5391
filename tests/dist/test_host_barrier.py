"""The barrier in shared memory: nobody passes early, a rank that died is noticed, and every wait is bounded."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from grpo_mc.megatron.host_barrier import STORES_STAY_IN_ORDER, HostBarrier, cells_bytes
from helpers.processes import run_distributed

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(not STORES_STAY_IN_ORDER, reason="elsewhere the collectives use gloo's barrier"),
]

ROUNDS = 2000


def join(path: Path, rank: int, ranks: int, timeout_s: float = 60.0) -> tuple[HostBarrier, Any]:
    """The barrier over a file, and a word of it for every rank to write in."""
    file = open(path, "r+b")  # noqa: SIM115 - the barrier keeps it
    memory = mmap.mmap(file.fileno(), cells_bytes(ranks) + 8 * ranks)
    words = memoryview(memory)[cells_bytes(ranks) :].cast("q")
    return HostBarrier(file, memory, 0, rank=rank, ranks=ranks, timeout_s=timeout_s), words


def make_file(folder: Path, ranks: int) -> Path:
    path = folder / "shared"
    path.write_bytes(bytes(cells_bytes(ranks) + 8 * ranks))
    return path


def count_together(path: Path) -> int:
    """Each rank writes the round, waits, reads everybody's, and waits again before the next round."""
    import torch.distributed as dist

    rank, ranks = dist.get_rank(), dist.get_world_size()
    barrier, words = join(path, rank, ranks)
    dist.barrier()
    wrong = 0
    for number in range(1, ROUNDS + 1):
        words[rank] = number
        barrier.wait()
        wrong += words.tolist() != [number] * ranks
        barrier.wait()
    return wrong


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_was_written_before_the_barrier_is_read_after_it(tmp_path: Path, ranks: int) -> None:
    assert run_distributed(count_together, ranks, make_file(tmp_path, ranks), timeout_s=120) == [0] * ranks


def arrive_once(path: Path, then: str) -> None:
    barrier, _ = join(path, 1, 2)
    (path.parent / "ready").touch()
    barrier.wait()
    if then == "sleep":
        time.sleep(60)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("then, words", [("die", "rank 1 of the group has ended"), ("sleep", "timed out: rank 1")])
def test_a_rank_that_died_or_does_not_come(tmp_path: Path, then: str, words: str) -> None:
    path = make_file(tmp_path, 2)
    barrier, _ = join(path, 0, 2, timeout_s=2.0)
    other = multiprocessing.get_context("spawn").Process(target=arrive_once, args=(path, then))
    other.start()
    try:
        bound = time.monotonic() + 60
        while not (tmp_path / "ready").exists():
            assert time.monotonic() < bound
            time.sleep(0.05)
        barrier.wait()
        start = time.monotonic()
        with pytest.raises(RuntimeError, match=words):
            barrier.wait()
        assert time.monotonic() - start < 10.0
    finally:
        other.kill()
        other.join(10)
