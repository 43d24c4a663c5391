"""Reduce-scatter with few bits on the wire: the documented sum to the last bit, steps that are undone, saved, late."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_mc.megatron.compressed_collectives import part_bounds
from grpo_mc.megatron.wire_format import INT4, INT8, WireFormat
from grpo_mc.ops import reference
from grpo_mc.ops.int4 import Int4Error, int4_error
from helpers.compare import relative_error
from helpers.processes import run_distributed

pytestmark = pytest.mark.dist

PLAIN4 = WireFormat(bits=4)
SIZES = (0, 1, 127, 3000, 40_001)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def gradient(rank: int, numel: int, dtype: torch.dtype = torch.float32, step: int = 0) -> Tensor:
    """Numbers with heavy tails."""
    draw = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(numel, generator=draw) / torch.randn(numel, generator=draw).abs().clamp_min(0.05)
    return x.to(dtype)


def as_received(x: Tensor, wire: WireFormat, error: Int4Error | None) -> Tensor:
    """What the owner of a part gets of it, by the operators' twins."""
    if wire.bits == 4:
        coded = reference.quantize_int4(x, block=wire.block, error=error)
        return reference.dequantize_int4(*coded, shape=x.shape)
    return reference.dequantize_int8(*reference.quantize_int8(x, block=wire.block, error=error), shape=x.shape)


def documented_sum(wholes: list[Tensor], wire: WireFormat, owner: int, errors: dict[int, Int4Error]) -> Tensor:
    """Part `owner`: contributions in the order of the ranks, every one quantised but the owner's."""
    first, last = part_bounds(wholes[0].numel(), len(wholes))[owner]
    total = torch.zeros(last - first)
    for rank, whole in enumerate(wholes):
        part = whole[first:last].float()
        total += part if rank == owner else as_received(part, wire, errors[rank])
    return total


def every_size() -> dict[Any, Tensor]:
    import torch.distributed as dist

    from grpo_mc.megatron.compressed_collectives import CompressedReduceScatter

    found, rank, ranks = {}, dist.get_rank(), dist.get_world_size()
    for wire in (PLAIN4, INT8):
        for numel in SIZES:
            scatter = CompressedReduceScatter(numel, dist.group.WORLD, wire)
            for step, dtype in enumerate(DTYPES):
                whole = gradient(rank, numel, dtype, step)
                before = whole.clone()
                found[wire, numel, step] = scatter.reduce_scatter(whole, divisor=ranks)
                assert torch.equal(whole, before)
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_sum_is_the_documented_one_to_the_last_bit(ranks: int) -> None:
    """All float types, parts that are odd, shorter than the others or empty; three steps, so that feedback counts."""
    results = run_distributed(every_size, ranks, timeout_s=120)
    for wire in (PLAIN4, INT8):
        for numel in SIZES:
            for owner, (first, last) in enumerate(part_bounds(numel, ranks)):
                errors = {rank: int4_error(torch.empty(last - first)) for rank in range(ranks)}
                for step, dtype in enumerate(DTYPES):
                    wholes = [gradient(rank, numel, dtype, step) for rank in range(ranks)]
                    want = documented_sum(wholes, wire, owner, errors)
                    got = results[owner][wire, numel, step]
                    assert got.dtype == torch.float32 and torch.equal(got, want / ranks), (wire, numel, owner, step)


def over_steps(numel: int, steps: int) -> dict[str, Tensor]:
    """The sum over steps of one gradient: by each format, in place, and through two levels (nodes of two)."""
    import torch.distributed as dist

    from grpo_mc.megatron.compressed_collectives import CompressedReduceScatter, HierarchicalReduceScatter

    world, rank, ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    scatters: dict[str, Any] = {
        "int4": CompressedReduceScatter(numel, world, INT4),
        "plain int4": CompressedReduceScatter(numel, world, PLAIN4),
        "int8": CompressedReduceScatter(numel, world, INT8),
    }
    if ranks == 4:
        node = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
        across = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
        scatters["two levels"] = HierarchicalReduceScatter(numel, node, across)
    whole = gradient(rank, numel)
    totals: dict[str, Tensor] = {}
    for name, scatter in scatters.items():
        first, last = scatter.bounds[rank]
        totals[name] = torch.zeros(last - first)
        for _ in range(steps):
            buffer = whole.clone()
            part = scatter.reduce_scatter(buffer, out=buffer[first:last])
            assert part.data_ptr() == buffer[first:last].data_ptr()
            totals[name] += part
    return totals


@pytest.mark.parametrize("ranks", [2, 4])
def test_sums_over_many_steps(ranks: int) -> None:
    """Relative squared error of the sum of 64 steps of one gradient: 1e-4 at most."""
    numel = 20_001
    results = run_distributed(over_steps, ranks, numel, 64, timeout_s=120)
    exact = 64 * torch.stack([gradient(rank, numel).double() for rank in range(ranks)]).sum(0)
    for name in results[0]:
        got = torch.cat([result[name] for result in results])
        assert relative_error(got, exact) ** 2 <= 1e-4, name
    assert ("two levels" in results[0]) == (ranks == 4)


def noisy(rank: int, numel: int, step: int) -> Tensor:
    """A gradient of a step: one with heavy tails, and noise of three times its typical size that differs each step."""
    draw = torch.Generator().manual_seed(7000 + 1000 * rank + step)
    return gradient(rank, numel).clamp(-30, 30) + 3 * torch.randn(numel, generator=draw)


def over_noisy_steps(numel: int, steps: int) -> dict[str, Tensor]:
    """This rank's part of the sum over steps: with feedback, and with every step's left-overs forgotten."""
    import torch.distributed as dist

    from grpo_mc.megatron.compressed_collectives import CompressedReduceScatter

    rank = dist.get_rank()
    totals = {}
    for name in ("feedback", "forgetful"):
        scatter = CompressedReduceScatter(numel, dist.group.WORLD)
        first, last = scatter.bounds[rank]
        totals[name] = torch.zeros(last - first, dtype=torch.float64)
        for step in range(steps):
            totals[name] += scatter.reduce_scatter(noisy(rank, numel, step))
            if name == "forgetful":
                scatter.reset()
    return totals


@pytest.mark.parametrize("ranks", [2, 4])
def test_feedback_is_what_makes_the_sum_over_steps_exact(ranks: int) -> None:
    """Gradients that differ from step to step, 4 bits, 64 steps: at most 1e-4 with feedback, and not without."""
    numel, steps = 20_001, 64
    results = run_distributed(over_noisy_steps, ranks, numel, steps, timeout_s=120)
    exact = torch.zeros(numel, dtype=torch.float64)
    for rank in range(ranks):
        for step in range(steps):
            exact += noisy(rank, numel, step)
    squared = {
        name: relative_error(torch.cat([result[name] for result in results]), exact) ** 2
        for name in ("feedback", "forgetful")
    }
    assert squared["feedback"] <= 1e-4 < squared["forgetful"], squared
    assert squared["forgetful"] > 5 * squared["feedback"], squared


def odd_inputs() -> dict[str, Any]:
    """Zeros, one entry of 1e30, entries at a block's largest magnitude; then a NaN on rank 1 in rank 0's part."""
    import torch.distributed as dist

    from grpo_mc.megatron.compressed_collectives import CompressedReduceScatter, finite_everywhere

    rank, numel = dist.get_rank(), 512
    scatter, found = CompressedReduceScatter(numel, dist.group.WORLD, INT4), {}
    found["zeros"] = scatter.reduce_scatter(torch.zeros(numel))
    whole = torch.ones(numel)
    whole[3] = whole[300] = 1e30
    found["outlier"] = scatter.reduce_scatter(whole)
    scatter.reset()
    found["largest"] = scatter.reduce_scatter(torch.full((numel,), -3.0))
    scatter.reduce_scatter(gradient(rank, numel))
    found["before"] = [part.clone() for part in scatter._error]
    whole = gradient(rank, numel, step=1)
    whole[5] = float("nan") if rank == 1 else 1.0
    part = scatter.reduce_scatter(whole)
    found["nan"] = part
    found["moved"] = any(not torch.equal(a, b) for a, b in zip(scatter._error, found["before"], strict=True))
    found["finite"] = finite_everywhere([part], dist.group.WORLD)
    scatter.undo()
    found["after"] = [part.clone() for part in scatter._error]
    scatter.undo()  # does nothing
    found["again"] = scatter.reduce_scatter(gradient(rank, numel, step=2))
    return found


def test_odd_inputs_and_a_step_that_is_thrown_away_on_every_rank() -> None:
    results = run_distributed(odd_inputs, 2, timeout_s=60)
    for rank, found in enumerate(results):
        assert not found["zeros"].any()
        assert found["outlier"].isfinite().all() and found["outlier"].max() == pytest.approx(2e30, rel=0.02)
        assert torch.allclose(found["largest"], torch.full((256,), -6.0), atol=1e-4)
        assert found["nan"].isnan().any() == (rank == 0) and not found["finite"] and found["moved"]
        assert all(torch.equal(a, b) for a, b in zip(found["before"], found["after"], strict=True))
        assert found["again"].isfinite().all()
    assert results[0]["nan"].isnan().nonzero().flatten().tolist() == list(range(128))  # its block and nothing else


def resumed() -> list[bool]:
    """Five steps in one go, and with everything saved and loaded into new objects after the second."""
    import torch.distributed as dist

    from grpo_mc.megatron.compressed_collectives import CompressedReduceScatter, HierarchicalReduceScatter

    rank, numel = dist.get_rank(), 777
    node = [dist.new_group([0]), dist.new_group([1])][rank]
    equal = []
    for make in (
        lambda: CompressedReduceScatter(numel, dist.group.WORLD),
        lambda: HierarchicalReduceScatter(numel, dist.group.WORLD, node),
        lambda: HierarchicalReduceScatter(numel, node, dist.group.WORLD),
    ):
        whole, second = make(), make()
        for step in range(5):
            want = whole.reduce_scatter(gradient(rank, numel, step=step))
            if step == 2:
                third = make()
                third.load_state_dict(second.state_dict())
                second = third
            equal.append(torch.equal(want, second.reduce_scatter(gradient(rank, numel, step=step))))
        second.reset()
        fresh = make()
        parts = (scatter.reduce_scatter(gradient(rank, numel)) for scatter in (second, fresh))
        equal.append(torch.equal(*parts))
    try:
        CompressedReduceScatter(numel + 1, dist.group.WORLD).load_state_dict(
            CompressedReduceScatter(numel, dist.group.WORLD).state_dict()
        )
    except ValueError as error:
        equal.append("'numel': 777" in str(error) and "reset()" in str(error))
    return equal


def test_a_resumed_reduce_scatter_goes_on_to_the_last_bit() -> None:
    assert all(run == [True] * 19 for run in run_distributed(resumed, 2, timeout_s=60))


def with_an_absent_rank() -> tuple[str, float]:
    import torch.distributed as dist

    from grpo_mc.megatron.compressed_collectives import CompressedReduceScatter

    group = dist.new_group([0, 1], timeout=timedelta(seconds=3))
    scatter = CompressedReduceScatter(1000, group)
    scatter.reduce_scatter(torch.ones(1000))
    start, message = time.monotonic(), ""
    if dist.get_rank() == 0:
        try:
            scatter.reduce_scatter(torch.ones(1000))
        except RuntimeError as error:
            message = str(error)
    seconds = time.monotonic() - start
    dist.barrier()
    return message, seconds


def test_a_rank_that_does_not_come_ends_the_wait_after_the_groups_timeout() -> None:
    (message, seconds), _ = run_distributed(with_an_absent_rank, 2, timeout_s=60)
    assert "imed out" in message
    assert 2.0 < seconds < 20.0


def mistakes() -> list[str]:
    import torch.distributed as dist

    from grpo_mc.megatron.compressed_collectives import CompressedReduceScatter, HierarchicalReduceScatter

    world, messages = dist.group.WORLD, []
    for scatter in (CompressedReduceScatter(8, world), HierarchicalReduceScatter(8, world, world)):
        for call in (
            lambda scatter=scatter: scatter.reduce_scatter(torch.ones(9)),
            lambda scatter=scatter: scatter.reduce_scatter(torch.ones(8), out=torch.ones(9)),
        ):
            try:
                call()
            except ValueError as error:
                messages.append(str(error))
    return messages


def test_mistakes_are_named() -> None:
    (messages,) = run_distributed(mistakes, 1, timeout_s=60)
    wrong_size, wrong_out = "whole has 9 entries; it must have 8", "out has 9 entries; rank 0 owns 8"
    assert messages == [f"reduce_scatter: {text}" for text in (wrong_size, wrong_out) * 2]
    with pytest.raises(ValueError, match="bits is 5; it must be 4 or 8"):
        WireFormat(bits=5)
    with pytest.raises(ValueError, match="block is 48; it must be a multiple of 32"):
        WireFormat(block=48)


@pytest.mark.parametrize(("wire", "ratio"), [(INT4, 7.4), (INT8, 3.8)])
def test_bytes_on_the_wire(wire: WireFormat, ratio: float) -> None:
    assert wire.num_bytes(1 << 20) <= (4 << 20) / ratio
