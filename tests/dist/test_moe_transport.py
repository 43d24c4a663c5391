"""What holds of dispatch and combine whatever the numbers: transposes, gradients, bits, bytes, errors, bounded waits."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.processes import run_distributed

pytestmark = pytest.mark.dist

EXPERTS = 4


def drawn(rank: int, tokens: int, hidden: int, top_k: int, dtype: torch.dtype = torch.float64) -> Any:
    """(x, expert_ids, probs) of a rank."""
    draw = torch.Generator().manual_seed(10 + rank)
    x = torch.randn(tokens, hidden, generator=draw, dtype=torch.float64).to(dtype)
    ids = torch.randint(-1, EXPERTS, (tokens, top_k), generator=draw)
    probs = torch.rand(tokens, top_k, generator=draw, dtype=torch.float64)
    return x, ids, probs if dtype == torch.float64 else probs.float()


def total(value: Tensor) -> float:
    """The sum over the ranks."""
    import torch.distributed as dist

    value = value.detach().double().clone()
    dist.all_reduce(value)
    return float(value)


def inner_products(group: Any, rank: int) -> list[tuple[float, float]]:
    """(<P x, y>, <x, P^T y>) of dispatch, and of combine with its own weights."""
    from grpo_mc.megatron.moe_dispatch import combine, dispatch

    x, ids, probs = drawn(rank, 6 - 2 * rank, 5, 3)
    x.requires_grad_()
    rows, _, _, handle = dispatch(x, ids, probs, group, EXPERTS, align=4)
    y = torch.randn(rows.shape, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    (transposed,) = torch.autograd.grad((rows * y).sum(), x)
    found = [(total((rows * y).sum()), total((x * transposed).sum()))]
    y.requires_grad_()
    out = combine(y, handle)
    (transposed,) = torch.autograd.grad((out * x.detach()).sum(), y)
    return [*found, (total((out * x).sum()), total((y * transposed).sum()))]


def checked_gradients(group: Any, rank: int) -> list[bool]:
    """gradcheck in step on both ranks: a rank's output depends on its own input only."""
    from grpo_mc.megatron.moe_dispatch import combine, dispatch

    def layer(x: Tensor, probs: Tensor, weighted: bool, **options: Any) -> Tensor:
        rows, row_probs, _, handle = dispatch(x, ids, probs, group, EXPERTS, **options)
        rows = torch.sin(rows) if weighted else torch.sin(rows * row_probs[:, None])
        return combine(rows, handle, weighted=weighted)

    x, ids, probs = drawn(rank, 3, 2, 2)
    inputs = (x.requires_grad_(), probs.requires_grad_())
    return [
        torch.autograd.gradcheck(lambda x, probs, o=options, w=weighted: layer(x, probs, w, **o), inputs)
        for weighted, options in ((True, {}), (False, {}), (True, {"align": 4, "capacity": 2}), (True, {"etp": 2}))
    ]


def by_hand(group: Any, rank: int) -> dict[str, Any]:
    """Rank 0 has tokens 1 and 2, rank 1 has token 4; rank 0 holds experts 0 and 1, rank 1 experts 2 and 3."""
    from grpo_mc.megatron.moe_dispatch import combine, dispatch

    x = torch.tensor([[1.0], [2.0]] if rank == 0 else [[4.0]], requires_grad=True)
    ids = torch.tensor([[3, 2], [0, 3]] if rank == 0 else [[3, 1]])
    probs = torch.tensor([[0.5, 0.25], [1.0, 0.125]] if rank == 0 else [[0.75, 2.0]], requires_grad=True)
    rows, row_probs, offsets, handle = dispatch(x, ids, probs, group, EXPERTS)
    factors = torch.repeat_interleave(torch.tensor([10.0, 100.0]) * (1 + rank), offsets.diff())
    out = combine(rows * factors[:, None], handle)
    out.sum().backward()
    found = {"rows": rows, "row_probs": row_probs, "offsets": offsets, "out": out, "x": x.grad, "probs": probs.grad}
    found = {name: tensor.flatten().tolist() for name, tensor in found.items() if tensor is not None}
    return found | {"counts": (handle.received.transport.send_counts, handle.received.transport.recv_counts)}


def repeated_bits(group: Any, rank: int) -> bool:
    """The same bits again, and with another number of threads."""
    from grpo_mc.megatron.moe_dispatch import combine, dispatch

    found = []
    for threads in (1, 1, 2):
        torch.set_num_threads(threads)
        x, ids, probs = drawn(rank, 600, 333, 4, torch.bfloat16)
        x.requires_grad_()
        rows, _, _, handle = dispatch(x, ids, probs, group, EXPERTS, payload="fp8")
        out = combine(torch.tanh(rows), handle)
        out.float().square().sum().backward()
        found.append((rows.detach(), out.detach(), x.grad))
    torch.set_num_threads(1)
    return all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def detached_rank(group: Any, rank: int) -> tuple[float, int]:
    """The experts of rank 1 use no row (a loop over experts that have some): rank 0's backward still has a partner."""
    from grpo_mc.megatron.moe_dispatch import combine, dispatch

    x = torch.ones(2, 3, requires_grad=True)
    rows, _, _, handle = dispatch(x, torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1), group, EXPERTS)
    out = combine(rows * 3 if len(rows) else torch.zeros(0, 3), handle)
    out.sum().backward()
    assert x.grad is not None
    return float(x.grad.sum()), len(rows)


def fp8_rows(group: Any, rank: int) -> dict[str, Any]:
    """What travels as FP8 is what quantize_fp8 gives, and an FP8 product takes it as it came."""
    from grpo_mc.megatron.moe_dispatch import dispatch
    from grpo_mc.megatron.moe_transport import row_bytes
    from grpo_mc.ops import dequantize_fp8, fp8_grouped_gemm, quantize_fp8

    x, ids, probs = drawn(0, 9, 300, 2, torch.float32)  # the same tokens on both ranks
    rows, _, offsets, handle = dispatch(x, ids, probs, group, EXPERTS, payload="fp8", align=8)
    codes, scale = handle.quantized_rows()
    whole = dispatch(x, ids, probs, group, EXPERTS, align=8).rows
    own_codes, own_scale = quantize_fp8(whole)
    is_token = (whole != 0).any(1)
    weight = torch.randn(2, 16, 300, generator=torch.Generator().manual_seed(1))
    quantized = [quantize_fp8(w, tile=(128, 128)) for w in weight]
    weight_codes, weight_scale = (torch.stack([q[i] for q in quantized]) for i in (0, 1))
    product = fp8_grouped_gemm(codes, scale, weight_codes, weight_scale, offsets, out_dtype=torch.float32)
    wide = [dequantize_fp8(*q, tile=(128, 128)) for q in quantized]
    bounds = offsets.tolist()
    expected = torch.cat([rows[bounds[e] : bounds[e + 1]] @ wide[e].T for e in range(2)])
    return {
        "codes": torch.equal(codes.view(torch.uint8)[is_token], own_codes.view(torch.uint8)[is_token]),
        "scale": torch.equal(scale[is_token], own_scale[is_token]),
        "rows": torch.equal(rows, dequantize_fp8(codes, scale)),
        "padding": float(scale[~is_token].abs().sum() + rows[~is_token].abs().sum()),
        "padded": int((~is_token).sum()),
        "product": float((product - expected).norm() / expected.norm()),
        "factor": row_bytes([(7168, torch.float8_e4m3fn), (56, torch.float32)])
        / row_bytes([(7168, torch.bfloat16)]),
    }  # fmt: skip


def refusals(group: Any, rank: int) -> dict[str, str]:
    """The message of each mistake; the last is seen only when the ranks compare."""
    from grpo_mc.megatron.moe_dispatch import combine, dispatch

    x, ids, probs = drawn(rank, 4, 3, 2, torch.float32)
    handle = dispatch(x, ids, probs, group, EXPERTS).handle
    calls: dict[str, Callable[[], Any]] = {
        "experts": lambda: dispatch(x, ids, probs, group, 3),
        "etp": lambda: dispatch(x, ids, probs, group, EXPERTS, etp=3),
        "range": lambda: dispatch(x, ids + 1, probs, group, EXPERTS - 2),
        "shapes": lambda: dispatch(x[:3], ids, probs, group, EXPERTS),
        "dtype": lambda: dispatch(x.half(), ids, probs, group, EXPERTS),
        "ids": lambda: dispatch(x, ids.int(), probs, group, EXPERTS),
        "probs": lambda: dispatch(x, ids, probs.double(), group, EXPERTS),
        "payload": lambda: dispatch(x, ids, probs, group, EXPERTS, payload="int4"),
        "wide fp8": lambda: dispatch(x.double(), ids, probs.double(), group, EXPERTS, payload="fp8"),
        "rows": lambda: combine(torch.zeros(handle.num_rows + 1, 3), handle),
        "quantized": handle.quantized_rows,
        "sizes": lambda: dispatch(x[:, : 3 - rank], ids, probs, group, EXPERTS),
        "payloads": lambda: dispatch(x, ids, probs, group, EXPERTS, payload=("fp8", "fp32")[rank]),
    }
    messages = {}
    for name, call in calls.items():
        with pytest.raises(ValueError) as caught:
            call()
        messages[name] = str(caught.value)
    return messages


def absent_rank(rank: int) -> tuple[str, float]:
    """Rank 1 does not come: rank 0's wait ends with the group's timeout."""
    import torch.distributed as dist

    from grpo_mc.megatron.moe_dispatch import dispatch

    group = dist.new_group([0, 1], timeout=timedelta(seconds=3))
    dispatch(*drawn(rank, 4, 3, 2), group, EXPERTS)  # connects the ranks
    start, message = time.monotonic(), ""
    if rank == 0:
        try:
            dispatch(*drawn(rank, 4, 3, 2), group, EXPERTS)
        except RuntimeError as error:
            message = str(error)
    dist.barrier()
    return message, time.monotonic() - start


def rank_main() -> dict[str, Any]:
    import torch.distributed as dist

    group, rank = dist.group.WORLD, dist.get_rank()
    parts = (inner_products, checked_gradients, by_hand, repeated_bits, detached_rank, fp8_rows, refusals)
    found = {part.__name__: part(group, rank) for part in parts}
    return found | {"absent_rank": absent_rank(rank)}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_distributed(rank_main, 2, timeout_s=90)


def test_transposes(ranks: Any) -> None:
    for forward, backward in (pair for found in ranks for pair in found["inner_products"]):
        assert forward == pytest.approx(backward, rel=1e-12) and abs(forward) > 0.1


def test_gradients_in_float64(ranks: Any) -> None:
    assert all(all(found["checked_gradients"]) for found in ranks)


def test_by_hand(ranks: Any) -> None:
    first, second = (found["by_hand"] for found in ranks)
    assert first["counts"] == ((1, 2), (1, 1)) and second["counts"] == ((1, 1), (2, 1))
    # Expert 0 sees token 2, expert 1 token 4; expert 2 sees token 1, expert 3 tokens 1, 2 and 4.
    assert (first["rows"], first["row_probs"], first["offsets"]) == ([2, 4], [1, 2], [0, 1, 2])
    assert second["rows"] == [1, 1, 2, 4] and second["row_probs"] == [0.25, 0.5, 0.125, 0.75]
    assert second["offsets"] == [0, 1, 4]
    # Experts multiply by 10, 100, 20 and 200.
    assert first["out"] == [0.5 * 200 + 0.25 * 20, 1 * 10 * 2 + 0.125 * 200 * 2]
    assert second["out"] == [0.75 * 200 * 4 + 2 * 100 * 4]
    assert first["x"] == [105, 35] and second["x"] == [350]
    assert first["probs"] == [200, 20, 20, 400] and second["probs"] == [800, 400]


def test_bits_do_not_depend_on_the_run_or_on_threads(ranks: Any) -> None:
    assert all(found["repeated_bits"] for found in ranks)


def test_a_rank_whose_experts_use_no_row_takes_part_in_backward(ranks: Any) -> None:
    assert [found["detached_rank"] for found in ranks] == [(18.0, 4), (18.0, 0)]


def test_fp8_rows_travel_with_their_scales(ranks: Any) -> None:
    for found in (found["fp8_rows"] for found in ranks):
        assert found["codes"] and found["scale"] and found["rows"]
        assert found["padding"] == 0 and found["padded"] > 0
        assert found["product"] < 1e-5
        assert found["factor"] == pytest.approx(0.516, abs=1e-3)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("experts", "3 experts on 2 ranks with etp 1; ranks / etp must divide the experts"),
        ("etp", "4 experts on 2 ranks with etp 3"),
        ("range", "it must hold -1 (none) to 1"),
        ("shapes", "x is [3, 3], expert_ids [4, 2] and probs [4, 2]; they must be [T, H], [T, K] and [T, K]"),
        ("dtype", "x is torch.float16"),
        ("ids", "expert_ids torch.int32"),
        ("probs", "probs is torch.float64; beside tokens of torch.float32 it must be torch.float32"),
        ("payload", "payload is 'int4'; it must be 'fp8', 'bf16', 'fp32', 'fp64' or None"),
        ("wide fp8", "payload is 'fp8' and x float64"),
        ("rows", "a row for each of dispatch's"),
        ("quantized", "dispatch them with payload='fp8'"),
        ("sizes", "the ranks of the group differ in their sizes"),
        ("payloads", "give every rank the same columns, choices, experts and payload"),
    ],
)
def test_refusals(mistake: str, message: str, ranks: Any) -> None:
    assert all(message in found["refusals"][mistake] for found in ranks)


def test_a_rank_that_does_not_come_ends_the_wait_after_the_groups_timeout(ranks: Any) -> None:
    message, seconds = ranks[0]["absent_rank"]
    assert "imed out" in message and 2.0 < seconds < 20.0
