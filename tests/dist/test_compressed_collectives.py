"""Reduce-scatter with few bits on the wire: against exact sums, step after step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from grpo_mc.megatron.compressed_collectives import CompressedReduceScatter, part_bounds
from helpers.compare import relative_error
from helpers.processes import run_distributed

pytestmark = pytest.mark.dist


def gradient(rank: int, numel: int) -> Tensor:
    draw = torch.Generator().manual_seed(rank)
    return torch.randn(numel, generator=draw) / torch.randn(numel, generator=draw).abs().clamp_min(0.05)


def sum_of_steps(numel: int, steps: int) -> Tensor:
    import torch.distributed as dist

    scatter, whole = CompressedReduceScatter(numel, dist.group.WORLD), gradient(dist.get_rank(), numel)
    return sum((scatter.reduce_scatter(whole) for _ in range(steps)), torch.zeros(()))


@pytest.mark.parametrize("ranks", [2])
def test_the_sum_over_many_steps_is_exact_to_a_hundredth(ranks: int) -> None:
    numel = 20_001
    results = run_distributed(sum_of_steps, ranks, numel, 64, timeout_s=60)
    exact = 64 * sum(gradient(rank, numel).double() for rank in range(ranks))
    for (first, last), result in zip(part_bounds(numel, ranks), results, strict=True):
        assert relative_error(result, exact[first:last]) ** 2 <= 1e-4
