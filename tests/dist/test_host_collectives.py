"""Shared memory between the ranks of a host gives what the collectives of torch give, to the last bit of their sum."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_mc.megatron import host_collectives
from helpers.processes import run_distributed

pytestmark = pytest.mark.dist

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
SIZES = (0, 1, 7, 4096, 300_001)
"""Elements of a shard; with a stage of 64 KiB the last takes many chunks, the very last one partly filled."""
SMALL_STAGE = 64 << 10


def values(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    """Numbers of very different sizes, so that another order of additions gives other bits."""
    draw = torch.Generator().manual_seed(100 * rank + size % 97)
    return (torch.randn(size, generator=draw) * 10 ** (4 * torch.rand(size, generator=draw) - 2)).to(dtype)


def in_place_collectives() -> dict[Any, Any]:
    """Both collectives for every dtype and size; also how many stages were opened."""
    import torch.distributed as dist

    host_collectives.STAGE_BYTES = SMALL_STAGE
    group, rank, ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    found: dict[Any, Any] = {}
    for dtype in DTYPES:
        for size in SIZES:
            whole = values(rank, ranks * size, dtype)
            before = whole.clone()
            shards = whole.view(ranks, -1) if size else [whole] * ranks
            host_collectives.reduce_scatter(shards[rank], whole, group=group)
            found["sum", dtype, size] = shards[rank].clone()
            others = [r for r in range(ranks) if r != rank]
            found["kept", dtype, size] = all(torch.equal(shards[r], before.view(ranks, -1)[r]) for r in others if size)
            host_collectives.all_gather(whole, shards[rank], group=group)
            found["all", dtype, size] = whole
    found["stages"] = [stage is not None for stage in host_collectives._stages.values()]
    host_collectives.close_stages()
    return found


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_sums_are_taken_in_the_order_of_the_ranks_and_reach_everybody(ranks: int) -> None:
    results = run_distributed(in_place_collectives, ranks, timeout_s=120)
    for dtype in DTYPES:
        for size in SIZES:
            total = values(0, ranks * size, dtype)
            for rank in range(1, ranks):
                total = total + values(rank, ranks * size, dtype)
            for rank, found in enumerate(results):
                assert torch.equal(found["sum", dtype, size], total[rank * size : (rank + 1) * size]), (dtype, size)
                assert torch.equal(found["all", dtype, size], total), (dtype, size)
                assert found["kept", dtype, size]
    assert all(found["stages"] == [True] for found in results)


def no_room(*args: Any) -> None:
    raise OSError(28, "No space left on device")


def through_gloo() -> list[Any]:
    """What cannot or shall not go through shared memory: no room for it, not in place, another operation."""
    import torch.distributed as dist

    group, rank = dist.group.WORLD, dist.get_rank()
    allocate, os.posix_fallocate = os.posix_fallocate, no_room
    whole = values(rank, 8, torch.float32)
    host_collectives.reduce_scatter(whole.view(2, -1)[rank], whole, group=group)
    host_collectives.all_gather(whole, whole.view(2, -1)[rank], group=group)
    assert host_collectives._stages == {group: None}
    os.posix_fallocate = allocate
    host_collectives.close_stages()
    apart = torch.empty(4)
    host_collectives.reduce_scatter(apart, values(rank, 8, torch.float32), group=group)
    gathered = torch.empty(8)
    host_collectives.all_gather(gathered, apart, group=group)
    largest = values(rank, 8, torch.float32)
    host_collectives.reduce_scatter(largest.view(2, -1)[rank], largest, op=dist.ReduceOp.MAX, group=group)
    return [whole, gathered, largest.view(2, -1)[rank].clone(), len(host_collectives._stages)]


def test_what_shared_memory_cannot_do_goes_through_gloo() -> None:
    results = run_distributed(through_gloo, 2, timeout_s=60)
    total = values(0, 8, torch.float32) + values(1, 8, torch.float32)
    largest = torch.maximum(values(0, 8, torch.float32), values(1, 8, torch.float32))
    for rank, (whole, gathered, part, stages) in enumerate(results):
        assert torch.equal(whole, total) and torch.equal(gathered, total)
        assert torch.equal(part, largest.view(2, -1)[rank])
        assert stages == 0  # nothing was opened for them


def with_an_absent_rank() -> tuple[str, float]:
    import torch.distributed as dist

    group = dist.new_group([0, 1], timeout=timedelta(seconds=3))
    whole = torch.ones(8)
    shard = whole.view(2, -1)[dist.get_rank()]
    host_collectives.reduce_scatter(shard, whole, group=group)
    start, message = time.monotonic(), ""
    if dist.get_rank() == 0:
        try:
            host_collectives.reduce_scatter(shard, whole, group=group)
        except RuntimeError as error:
            message = str(error)
    dist.barrier()
    return message, time.monotonic() - start


def test_a_rank_that_does_not_come_ends_the_wait_after_the_groups_timeout() -> None:
    (message, seconds), _ = run_distributed(with_an_absent_rank, 2, timeout_s=60)
    assert "imed out" in message
    assert 2.0 < seconds < 20.0


def test_only_the_right_file_is_mapped(tmp_path: Path) -> None:
    token, num_bytes = b"0123456789abcdef", 4096
    made = host_collectives._make_file(num_bytes, token)
    assert made is not None
    memory = host_collectives._map_file(made, num_bytes, token)
    assert memory is not None and memory[:num_bytes] == bytes(num_bytes)
    opened = host_collectives._open_file(f"/proc/self/fd/{made.fileno()}")
    assert opened is not None
    same = host_collectives._map_file(opened, num_bytes, token)
    assert same is not None
    memory[7] = 42
    assert same[7] == 42
    assert host_collectives._map_file(opened, num_bytes, b"of another host.") is None
    assert host_collectives._open_file(str(tmp_path / "absent")) is None
    (tmp_path / "short").write_bytes(token)
    short = host_collectives._open_file(str(tmp_path / "short"))
    assert short is not None and host_collectives._map_file(short, num_bytes, token) is None
    read, write = os.pipe()
    pipe = host_collectives._open_file(f"/proc/self/fd/{read}")
    assert pipe is None or host_collectives._map_file(pipe, num_bytes, token) is None
    os.close(read)
    os.close(write)


def test_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.posix_fallocate", no_room)
    assert host_collectives._make_file(4096, b"t" * 16) is None
