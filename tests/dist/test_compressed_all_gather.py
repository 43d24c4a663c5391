"""Weights gathered as 4-bit differences: the ranks' copies are equal, follow the owners, and heal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.compare import relative_error
from helpers.processes import run_distributed

pytestmark = pytest.mark.dist

SIZES = (0, 1, 127, 3001)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def weights(numel: int, step: int = 0) -> Tensor:
    """A walk of small steps."""
    draw = torch.Generator().manual_seed(0)
    steps = [torch.randn(numel, generator=draw) * (1e-3 if at else 1.0) for at in range(step + 1)]
    return torch.stack(steps).sum(0)


def walk() -> dict[Any, Any]:
    """Six steps of every size and dtype; a refresh would be the seventh."""
    import torch.distributed as dist

    from grpo_mc.megatron.compressed_all_gather import CompressedAllGather

    world, found = dist.group.WORLD, {}
    for dtype in DTYPES:
        for numel in SIZES:
            gather = CompressedAllGather(numel, world, refresh_every=6)
            first, last = gather.bounds[dist.get_rank()]
            copy = torch.full((numel,), float("nan"), dtype=dtype)
            for step in range(6):
                gather.all_gather(weights(numel, step)[first:last], copy)
                found[dtype, numel, step] = copy.clone()
    return found


@pytest.mark.parametrize("ranks", [1, 3])
def test_copies_are_equal_and_follow_the_weights(ranks: int) -> None:
    results = run_distributed(walk, ranks, timeout_s=60)
    for key, copy in results[0].items():
        dtype, numel, step = key
        assert all(torch.equal(copy, result[key]) for result in results), key
        exact = weights(numel, step)
        if step == 0:  # the weights themselves
            assert torch.equal(copy, exact.to(dtype))
        # A step's size is 1e-3; of each step a tenth stays behind, and is in the next difference.
        assert relative_error(copy.float(), exact) <= (4e-4 if dtype == torch.float32 else 4e-3), key
        assert numel < 100 or not step or not torch.equal(copy, results[0][dtype, numel, step - 1])


def special() -> dict[str, Any]:
    import torch.distributed as dist

    from grpo_mc.megatron.compressed_all_gather import CompressedAllGather

    world, rank, found = dist.group.WORLD, dist.get_rank(), {}
    gather, copy = CompressedAllGather(600, world), torch.zeros(600)
    first, last = gather.bounds[rank]
    for step in range(3):
        part = weights(600, step)[first:last]
        if step == 1 and rank == 0:
            part[7] = float("nan")
        gather.all_gather(part, copy)
        found[f"copy {step}"] = copy.clone()
    later = CompressedAllGather(600, world)
    later.load_state_dict(gather.state_dict())
    both = [copy.clone(), copy.clone()]
    for one, scheme in zip(both, (gather, later), strict=True):
        scheme.all_gather(weights(600, 3)[first:last], one)
    found["resumed"] = torch.equal(*both) and not torch.equal(both[0], weights(600, 3))
    gather.reset()
    found["refreshed"] = torch.equal(gather.all_gather(weights(600, 4)[first:last], copy), weights(600, 4))
    found["messages"] = []
    for part, whole in ((torch.ones(3), copy), (copy[first:last], copy)):
        try:
            gather.all_gather(part, whole)
        except ValueError as error:
            found["messages"].append(str(error))
    return found


def test_a_nan_heals_a_saved_one_goes_on_and_mistakes_are_named() -> None:
    results = run_distributed(special, 2, timeout_s=60)
    for found in results:
        assert found["copy 1"].isnan().nonzero().flatten().tolist() == list(range(128))
        assert torch.equal(found["copy 2"], weights(600, 2))
        assert found["resumed"] and found["refreshed"]
        assert "part has 3 entries" in found["messages"][0] and "shares memory" in found["messages"][1]
