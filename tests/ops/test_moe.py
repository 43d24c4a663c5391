"""Routing, permuting and unpermuting: by hand, against the loops of the reference, gradients, every odd batch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grpo_mc import ops
from grpo_mc.ops import reference
from grpo_mc.ops.moe import moe_place, moe_plan
from helpers import cuda_emulator
from helpers.compare import assert_close

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
NAN = float("nan")


def batch(
    tokens: int, experts: int, top_k: int, hidden: int = 24, *, none: float = 0.1, seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """x, expert_ids with some choices of no expert, probs."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(experts, (tokens, top_k), generator=draw)
    ids[torch.rand(tokens, top_k, generator=draw) < none] = -1
    x = torch.randn(tokens, hidden, generator=draw).to(dtype)
    probs = torch.rand(tokens, top_k, generator=draw)
    return x, ids, probs.double() if dtype == torch.float64 else probs


def test_by_hand() -> None:
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    ids, probs = torch.tensor([[1, 0], [1, -1], [0, 1]]), torch.tensor([[0.5, 0.25], [1.0, 9.0], [0.75, 2.0]])
    rows, row_probs, row_map, offsets = ops.moe_permute(x, ids, probs, num_experts=3)
    assert rows.tolist() == [[1, 2], [5, 6], [1, 2], [3, 4], [5, 6]]
    assert row_probs.tolist() == [0.25, 0.75, 0.5, 1.0, 2.0]
    assert row_map.tolist() == [[2, 0], [3, -1], [1, 4]]
    assert offsets.tolist() == [0, 2, 5, 5]
    assert ops.moe_unpermute(rows, row_map, probs).tolist() == [[0.75, 1.5], [3.0, 4.0], [13.75, 16.5]]


def test_capacity_and_alignment_by_hand() -> None:
    x, ids, probs = torch.ones(3, 1), torch.tensor([[0], [0], [0]]), torch.tensor([[1.0], [2.0], [3.0]])
    rows, row_probs, row_map, offsets = ops.moe_permute(x, ids, probs, num_experts=2, capacity=2, align=4)
    assert rows.flatten().tolist() == [1, 1, 0, 0] and row_probs.tolist() == [1, 2, 0, 0]
    assert row_map.flatten().tolist() == [0, 1, -1] and offsets.tolist() == [0, 4, 4]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "tokens, experts, top_k, options",
    [
        (0, 4, 2, {}), (1, 1, 1, {}), (50, 8, 1, {}), (50, 8, 8, {}), (40, 16, 2, {"capacity": 3}),
        (7, 5, 2, {"capacity": 0}), (33, 4, 3, {"align": 16}), (20, 6, 2, {"align": 128, "capacity": 5}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("hidden", (1, 24, 2880 // 8))
def test_the_loops_say_the_same(
    tokens: int, experts: int, top_k: int, options: dict[str, int], hidden: int, dtype: torch.dtype
) -> None:
    x, ids, probs = batch(tokens, experts, top_k, hidden, dtype=dtype)
    got = ops.moe_permute(x, ids, probs, num_experts=experts, **options)
    want = reference.moe_permute(x, ids, probs, num_experts=experts, **options)
    for ours, theirs in zip(got, want, strict=True):
        assert ours.shape == theirs.shape and torch.equal(ours, theirs)
    for weights in (probs, None):
        back = ops.moe_unpermute(got[0], got[2], weights)
        exact = reference.moe_unpermute(got[0].double(), got[2], weights)
        assert back.dtype == dtype
        assert_close(back, exact, 3e-3 if dtype == torch.bfloat16 else 1e-6, options)


def test_every_batch_that_is_lopsided() -> None:
    x = torch.randn(30, 16)
    for ids in (torch.full((30, 2), -1), torch.full((30, 2), 3), torch.tensor([[0, 3]]).expand(30, 2)):
        rows, _, row_map, offsets = ops.moe_permute(x, ids, torch.ones(30, 2), num_experts=4)
        assert offsets[-1] == len(rows) == int((ids >= 0).sum())
        count = (ids >= 0).sum(1, keepdim=True)
        assert torch.allclose(ops.moe_unpermute(rows, row_map, None), x * count)


def test_nothing_stale_is_read() -> None:
    """H17: experts without tokens, memory full of NaN before."""
    x, ids = torch.randn(4, 64), torch.tensor([[0], [0], [3], [0]])
    out = torch.full((50, 64), NAN)
    rows, row_probs, row_map, offsets = ops.moe_permute(x, ids, torch.ones(4, 1), num_experts=4, align=8, out=out)
    assert rows.data_ptr() == out.data_ptr() and rows.shape == (16, 64)
    assert rows.isfinite().all() and out[16:].isnan().all() and offsets.tolist() == [0, 8, 8, 8, 16]
    assert row_probs.sum() == 4
    back = torch.full((4, 64), NAN)
    assert ops.moe_unpermute(rows, row_map, None, out=back) is back and torch.equal(back, x)
    nothing = ops.moe_unpermute(rows[:0], torch.full((4, 1), -1), None)
    assert torch.equal(nothing, torch.zeros(4, 64))


def test_long_rows_strides_and_other_dtypes() -> None:
    x, ids, probs = batch(37, 5, 3, 2048, dtype=torch.bfloat16)
    want = reference.moe_permute(x, ids, probs, num_experts=5)[0]
    wide = torch.randn(37, 2500).bfloat16()
    wide[:, 7:2055] = x
    for strided in (wide[:, 7:2055], x.t().contiguous().t()):
        assert torch.equal(ops.moe_permute(strided, ids, probs, num_experts=5)[0], want)
    unaligned = torch.empty(200 * 2049, dtype=torch.bfloat16)[1 : 1 + 200 * 2048].view(200, 2048)
    assert torch.equal(ops.moe_permute(x, ids, probs, num_experts=5, out=unaligned)[0], want)
    codes = x.to(torch.float8_e4m3fn)
    got = ops.moe_permute(codes, ids, probs, num_experts=5)[0]
    assert torch.equal(got.view(torch.uint8), want.to(torch.float8_e4m3fn).view(torch.uint8))


@pytest.mark.parametrize("options", [{}, {"capacity": 2}, {"align": 4}])
def test_gradients(options: dict[str, int]) -> None:
    x, ids, probs = batch(9, 4, 2, 5, dtype=torch.float64)
    x.requires_grad_(), probs.requires_grad_()

    def through(x: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        rows, row_probs, row_map, _ = ops.moe_permute(x, ids, probs, num_experts=4, **options)
        return ops.moe_unpermute(rows.square() * row_probs[:, None], row_map, probs), row_probs.square()

    assert torch.autograd.gradcheck(through, (x, probs))
    rows = torch.randn(8, 5, dtype=torch.float64, requires_grad=True)
    row_map = torch.tensor([[0, 7], [3, -1], [-1, -1]])
    assert torch.autograd.gradcheck(lambda rows: ops.moe_unpermute(rows, row_map, None), (rows,))


def test_backward_is_the_transpose() -> None:
    """<P x, y> = <x, P^T y>, in bfloat16's range of errors too."""
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        x, ids, probs = batch(64, 8, 4, 256, dtype=dtype)
        x.requires_grad_()
        rows, _, _, _ = ops.moe_permute(x, ids, probs, num_experts=8)
        y = torch.randn(rows.shape).to(dtype)
        rows.backward(y)
        assert x.grad is not None
        left, right = (rows.double() * y.double()).sum(), (x.double() * x.grad.double()).sum()
        assert abs(left - right) <= bound * rows.double().norm() * y.double().norm()


def test_threads_do_not_change_a_bit() -> None:
    x, ids, probs = batch(400, 16, 4, 512)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            rows, _, row_map, _ = ops.moe_permute(x, ids, probs, num_experts=16)
            results.append((rows, ops.moe_unpermute(rows, row_map, probs)))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


def test_the_bias_chooses_and_weighs_nothing() -> None:
    """H18: sigmoid, bias on expert 3 only."""
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]], requires_grad=True)
    bias = torch.tensor([0.0, 0.0, 0.0, 3.0], requires_grad=True)
    ids, probs = ops.moe_route(logits, top_k=2, score="sigmoid", bias=bias)
    assert ids.tolist() == [[3, 0]]
    assert probs.flatten().tolist() == pytest.approx([0.268941, 0.880797], abs=1e-6)
    _, weights = ops.moe_route(logits, top_k=2, score="sigmoid", bias=bias, normalize=True)
    assert weights.flatten().tolist() == pytest.approx([0.233915, 0.766085], abs=1e-6)
    probs.sum().backward()
    assert bias.grad is None and logits.grad is not None and logits.grad[0, 1:3].tolist() == [0, 0]


@pytest.mark.parametrize("score", ("softmax", "sigmoid"))
@pytest.mark.parametrize("experts, top_k", [(8, 1), (8, 8), (64, 2), (128, 8), (256, 8)])
def test_routes_match_the_loops(experts: int, top_k: int, score: str) -> None:
    draw = torch.Generator().manual_seed(experts)
    logits = torch.randn(20, experts, generator=draw).bfloat16().float()  # ties are likely
    bias = torch.randn(experts, generator=draw)
    for given_bias, normalize in ((None, False), (bias, True)):
        got = ops.moe_route(logits, top_k=top_k, score=score, bias=given_bias, normalize=normalize)
        want = reference.moe_route(logits, top_k=top_k, score=score, bias=given_bias, normalize=normalize)
        assert torch.equal(got[0], want[0])
        assert torch.allclose(got[1], want[1], atol=1e-7)
    ids, _ = ops.moe_route(torch.zeros(1, experts), top_k=top_k, score=score)
    assert ids.tolist() == [list(range(top_k))]


def test_a_route_of_half_numbers_is_computed_in_float() -> None:
    ids, probs = ops.moe_route(torch.tensor([[0.0, 1.0]]).bfloat16(), top_k=1)
    assert probs.dtype == torch.float32 and ids.tolist() == [[1]]
    assert math.isclose(float(probs), 1 / (1 + math.exp(-1)), rel_tol=1e-6)


def test_a_bad_logit_is_seen_and_weights_of_zero_stay_zero() -> None:
    logits = torch.zeros(2, 4)
    logits[0, 1] = NAN
    for score in ("softmax", "sigmoid"):
        _, probs = ops.moe_route(logits, top_k=2, score=score)
        assert probs.isnan().tolist() == [[True, True], [False, False]]
    _, probs = ops.moe_route(torch.full((1, 4), -200.0), top_k=2, score="sigmoid", normalize=True)
    assert probs.tolist() == [[0.0, 0.0]]


def test_outputs_lie_apart() -> None:
    x, ids, probs = batch(6, 4, 2, 9, none=0.0)
    with pytest.raises(ValueError, match="its entries must lie apart"):
        ops.moe_permute(x, ids, probs, num_experts=4, out=torch.zeros(1, 9).expand(12, 9))
    memory = torch.zeros(12, 9)
    with pytest.raises(ValueError, match="shares memory with an input"):
        ops.moe_permute(memory[:6], ids, probs, num_experts=4, out=memory)
    rows, _, row_map, _ = ops.moe_permute(x, ids, probs, num_experts=4)
    with pytest.raises(ValueError, match="shares memory with an input"):
        ops.moe_unpermute(rows, row_map, None, out=rows[:6])


def permute(ids: list[list[int]] = [[1], [0]], rows: int = 2, **options: Any) -> Any:  # noqa: B006 - never changed
    probs = torch.ones(options.pop("probs", (2, 1)))
    x = torch.ones(rows, 3, requires_grad=options.pop("requires_grad", False))
    return ops.moe_permute(x, torch.tensor(ids), probs, **{"num_experts": 4, **options})


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: permute([[4], [0]]), "expert_ids holds 4"),
        (lambda: permute([[-2], [0]]), "expert_ids holds -2"),
        (lambda: permute(rows=3), "x has 3 rows"),
        (lambda: permute(probs=(2, 2)), "probs has shape"),
        (lambda: permute(num_experts=0), "num_experts is 0"),
        (lambda: permute(align=0), "align is 0"),
        (lambda: permute(align=2**62), "align is 4611686018427387904; it must be 1 to 1048576"),
        (lambda: permute(num_experts=2**31), "num_experts is 2147483648; it must be 1 to 1048576"),
        (lambda: permute(capacity=-1), "capacity is -1"),
        (lambda: permute(out=torch.ones(1, 3)), "at least 2"),
        (lambda: permute(out=torch.ones(2, 3), requires_grad=True), "needs a gradient"),
        (lambda: ops.moe_unpermute(torch.ones(2, 3).half(), torch.tensor([[1]]), None), "rows has dtype Half"),
        (lambda: ops.moe_route(torch.ones(2, 3), top_k=4), "top_k 4"),
        (lambda: ops.moe_route(torch.ones(2, 3), top_k=1, score="tanh"), "score is 'tanh'"),
        (lambda: ops.moe_route(torch.ones(2, 3), top_k=1, bias=torch.ones(2)), "bias has shape"),
    ],
)
def test_bad_input_is_named(call: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()  # type: ignore[operator]


def test_a_map_that_makes_no_sense_is_an_error_or_on_a_gpu_nan() -> None:
    """Without a look at the map, which would wait for the device, no memory but the rows' is read or written."""
    rows = torch.arange(6.0).view(2, 3)
    far, twice = torch.tensor([[2, 0], [-2, 1], [2**40, -1], [1, 0]]), torch.tensor([[1, 1]])
    if not cuda_emulator.IS_USED:
        for row_map, words in ((far, "row_map holds 2"), (twice, "row 1 twice")):
            for call in (
                lambda row_map=row_map: ops.moe_unpermute(rows, row_map, None),
                lambda row_map=row_map: moe_place(torch.ones(len(row_map), 3), row_map, out=torch.ones(2, 3)),
            ):
                with pytest.raises(ValueError, match=words):
                    call()
        return
    summed = ops.moe_unpermute(rows, far, None)
    assert summed.isnan().all(1).tolist() == [True, True, True, False] and torch.equal(summed[3], rows.sum(0))
    assert torch.equal(ops.moe_unpermute(rows, twice, None), 2 * rows[1:])
    placed = moe_place(torch.tensor([[1.0], [2.0], [3.0], [4.0]]).expand(4, 3).contiguous(), far, out=torch.ones(2, 3))
    assert placed[:, 0].tolist() == [4.0, 4.0]
    grad_rows, grad_probs = torch.ops.grpo_mc.moe_unpermute_backward(torch.ones(4, 3), rows, far, torch.ones(4, 2))
    assert torch.equal(grad_rows, torch.ones(2, 3))
    assert grad_probs.isnan().nonzero().tolist() == [[0, 0], [1, 0], [2, 0]]


def test_experts_of_many_choices_and_many_experts() -> None:
    """Chunks of choices that are counted apart, more experts than threads, more counters than fit."""
    sizes = ((4500, 3, 2, None), (1000, 200, 5, 9), (2100, 1500, 5, 3), (3000, 2**20, 3, None))
    for tokens, experts, top_k, capacity in sizes:
        _, ids, _ = batch(tokens, experts, top_k, 1, seed=tokens)
        row_map, offsets = moe_plan(ids, num_experts=experts, capacity=capacity, align=2)
        flat = ids.flatten()
        order = flat.argsort(stable=True)[int((flat < 0).sum()) :]
        counts = flat[order].bincount(minlength=experts)
        rank = torch.arange(len(order)) - (counts.cumsum(0) - counts)[flat[order]]
        kept = counts if capacity is None else counts.clamp_max(capacity)
        bounds = torch.cat([torch.zeros(1, dtype=torch.int64), ((kept + 1) // 2 * 2).cumsum(0)])
        want = torch.full_like(flat, -1)
        want[order] = torch.where(rank < kept[flat[order]], bounds[flat[order]] + rank, -1)
        assert torch.equal(offsets, bounds) and torch.equal(row_map.flatten(), want)


def test_opcheck() -> None:
    x, ids, probs = batch(6, 4, 2, 8)
    torch.library.opcheck(torch.ops.grpo_mc.moe_plan.default, (ids, 4, 2, 4))
    row_map, offsets = torch.ops.grpo_mc.moe_plan(ids, 4, None, 1)
    count = int(offsets[-1])
    x.requires_grad_(), probs.requires_grad_()
    torch.library.opcheck(torch.ops.grpo_mc.moe_permute.default, (x, probs, row_map, count))
    rows = torch.randn(count, 8, requires_grad=True)
    torch.library.opcheck(torch.ops.grpo_mc.moe_unpermute.default, (rows, row_map, probs))
    plain = (x.detach(), probs.detach(), rows.detach())
    torch.library.opcheck(
        torch.ops.grpo_mc.moe_permute_.default, (torch.ones(count, 8), torch.ones(count), *plain[:2], row_map)
    )
    torch.library.opcheck(torch.ops.grpo_mc.moe_unpermute_.default, (torch.ones(6, 8), plain[2], row_map, None))
    torch.library.opcheck(torch.ops.grpo_mc.moe_unpermute_backward.default, (plain[0], plain[2], row_map, plain[1]))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 30), st.integers(1, 9), st.integers(1, 4), st.integers(1, 70), st.sampled_from((None, 0, 1, 4)),
    st.sampled_from((1, 3, 16)), st.sampled_from(DTYPES), st.integers(0, 2**31),
)  # fmt: skip
def test_random_batches(
    tokens: int, experts: int, top_k: int, hidden: int, capacity: int | None, align: int, dtype: torch.dtype, seed: int
) -> None:
    x, ids, probs = batch(tokens, experts, top_k, hidden, none=0.3, seed=seed, dtype=dtype)
    got = ops.moe_permute(x, ids, probs, num_experts=experts, capacity=capacity, align=align)
    want = reference.moe_permute(x, ids, probs, num_experts=experts, capacity=capacity, align=align)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(got, want, strict=True))
    exact = reference.moe_unpermute(got[0].double(), got[2], probs)
    assert_close(ops.moe_unpermute(got[0], got[2], probs), exact, 4e-3 if dtype == torch.bfloat16 else 1e-6, tokens)
