"""The process helpers themselves: results come back, failures show every rank, nothing is left running."""

from __future__ import annotations

import subprocess
import sys
import time
import uuid

import psutil
import pytest

from helpers.processes import ProcessFailure, run_command, run_distributed

pytestmark = pytest.mark.dist


def _sum_of_ranks(offset: int) -> tuple[int, float]:
    import torch
    import torch.distributed as dist

    value = torch.tensor([float(dist.get_rank() + offset)])
    dist.all_reduce(value)
    return dist.get_rank(), float(value)


def _second_rank_fails() -> None:
    import torch.distributed as dist

    if dist.get_rank() == 1:
        raise RuntimeError("rank one gives up")
    dist.barrier()


def _hang_with_a_child() -> None:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    time.sleep(600)


def _alive_with(variable: str, value: str) -> list[int]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(variable) == value:
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def test_results_come_back_by_rank() -> None:
    assert run_distributed(_sum_of_ranks, 2, 10) == [(0, 21.0), (1, 21.0)]


def test_a_failing_rank_is_shown_and_the_others_end() -> None:
    with pytest.raises(ProcessFailure, match="rank one gives up"):
        run_distributed(_second_rank_fails, 2, timeout_s=60)


def test_a_hang_ends_with_its_grandchildren() -> None:
    case = uuid.uuid4().hex
    start = time.monotonic()
    with pytest.raises(ProcessFailure, match="still running after 4"):
        run_distributed(_hang_with_a_child, 1, timeout_s=4, env={"TEST_CASE": case}, init=False)
    assert time.monotonic() - start < 20
    assert not _alive_with("TEST_CASE", case)


def test_a_command_past_its_time_is_ended() -> None:
    with pytest.raises(ProcessFailure, match="still running"):
        run_command([sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(600)"], timeout_s=2)
