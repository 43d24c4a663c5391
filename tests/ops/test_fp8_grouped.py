"""FP8 for experts: tiles that restart at each expert, and the weight gradients computed from them."""

from __future__ import annotations

import itertools
import os
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grpo_mc import ops
from grpo_mc.ops import reference
from helpers.compare import FP8_SUMS, assert_close, relative_error

TOKENS = (128, 1)
COUNTS = [[0], [0, 0, 70], [128, 0, 127, 129, 1], [3, 9, 0, 5], [1] * 64, [600, 0], [256, 128], [260, 5, 131]]


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def offsets_of(counts: list[int], before: int = 0) -> Tensor:
    return before + torch.tensor([0, *counts]).cumsum(0)


def distinct(scale: Tensor, period: int) -> Tensor:
    """Scales that differ from column to column and from tile to tile: what is mixed up shows."""
    return (1.0 + torch.arange(scale.numel()).remainder(period)).view_as(scale) / 16


def wgrad_operands(counts: list[int], n: int, k: int, *, before: int = 0, after: int = 0) -> tuple[Tensor, ...]:
    """Operands of experts with so many rows each, and rows of no expert before and after, which hold NaN."""
    rows, offsets = before + sum(counts) + after, offsets_of(counts, before)
    grad, grad_scale = ops.quantize_fp8(normal(rows, n), tile=TOKENS, offsets=offsets)
    x, x_scale = ops.quantize_fp8(normal(rows, k, seed=1), tile=TOKENS, offsets=offsets)
    for codes, rest in itertools.product((grad, x), (slice(0, before), slice(rows - after, rows))):
        codes.view(torch.uint8)[rest] = 0x7F
    return grad, distinct(grad_scale, 37), x, distinct(x_scale, 23), offsets


@pytest.mark.parametrize("counts", COUNTS, ids=lambda counts: str(counts[:5]))
def test_tiles_restart_at_each_expert(counts: list[int]) -> None:
    """Bit for bit what each expert's rows have by themselves; rows of no expert hold NaN and count nowhere."""
    for dtype, power_of_two in itertools.product((torch.float32, torch.bfloat16, torch.float16), (False, True)):
        x = normal(sum(counts) + 5, 37, dtype=dtype)
        x[:2], x[-3:] = float("nan"), float("inf")
        offsets = offsets_of(counts, 2)
        q, scale = ops.quantize_fp8(x, tile=TOKENS, power_of_two=power_of_two, offsets=offsets)
        want_q, want_scale = reference.quantize_fp8(x, tile=TOKENS, power_of_two=power_of_two, offsets=offsets)
        assert torch.equal(scale, want_scale) and torch.equal(q.view(torch.uint8), want_q.view(torch.uint8))
        assert scale.shape == (len(x) // 128 + len(counts), 37) and scale.isfinite().all() and (scale > 0).all()
        for expert, count in enumerate(counts):
            first = int(offsets[expert])
            alone_q, alone_scale = ops.quantize_fp8(x[first : first + count], tile=TOKENS, power_of_two=power_of_two)
            tile = first // 128 + expert
            assert torch.equal(q[first : first + count].view(torch.uint8), alone_q.view(torch.uint8))
            assert torch.equal(scale[tile : tile + len(alone_scale)], alone_scale)
        for out_dtype in (torch.float32, torch.bfloat16):
            got = ops.dequantize_fp8(q, scale, tile=TOKENS, dtype=out_dtype, offsets=offsets)
            want = reference.dequantize_fp8(q, scale, tile=TOKENS, dtype=out_dtype, offsets=offsets)
            assert torch.equal(got, want) and not got[:2].any() and not got[-3:].any()


def test_one_bad_row_spoils_its_own_tile_of_its_own_expert() -> None:
    x = normal(300, 3)
    x[140, 1] = float("nan")  # rows 100 to 228 of expert 1 are its first tile
    q, scale = ops.quantize_fp8(x, tile=TOKENS, offsets=torch.tensor([0, 100, 300]))
    spoilt = torch.zeros(300, 3, dtype=torch.bool)
    spoilt[100:228, 1] = True
    assert torch.equal(q.float().isnan(), spoilt)
    assert scale.isnan().nonzero().tolist() == [[1, 1]]


def test_gradient_by_hand() -> None:
    """Expert 0 has tokens 0 and 1, expert 1 token 2: 1 * 3 + 2 * 4 = 11, and 5 * 6 = 30, times the scales."""
    grad, x = (torch.tensor(numbers)[:, None].to(torch.float8_e4m3fn) for numbers in ([1.0, 2, 5], [3.0, 4, 6]))
    grad_scale, x_scale = torch.tensor([[10.0], [100.0]]), torch.tensor([[1.0], [2.0]])
    got = ops.fp8_grouped_wgrad(grad, grad_scale, x, x_scale, torch.tensor([0, 2, 3]))
    assert isinstance(got, Tensor) and got.flatten().tolist() == [110.0, 6000.0]


@pytest.mark.parametrize("counts", COUNTS, ids=lambda counts: str(counts[:5]))
@pytest.mark.parametrize("n, k", [(40, 200), (7, 3), (1, 1), (33, 8)])
def test_gradients_match_float64(counts: list[int], n: int, k: int) -> None:
    operands = wgrad_operands(counts, n, k, before=2, after=3)
    want = reference.fp8_grouped_wgrad(*operands, out_dtype=torch.float64)
    got = ops.fp8_grouped_wgrad(*operands)
    assert isinstance(want, Tensor) and isinstance(got, Tensor) and got.dtype == torch.float32
    assert_close(got, want, FP8_SUMS, counts)
    bf16 = ops.fp8_grouped_wgrad(*operands, out_dtype=torch.bfloat16)
    assert isinstance(bf16, Tensor) and bf16.dtype == torch.bfloat16
    assert_close(bf16, want, 3e-3, counts)
    empty = torch.tensor(counts) == 0
    assert not got[empty].any()
    total = normal(*got.shape, seed=2)
    total[empty] = -0.0  # not even the sign of a zero changes
    before = total.clone()
    assert ops.fp8_grouped_wgrad(*operands, accumulate_into=total) is total
    assert_close(total, before.double() + want, FP8_SUMS, counts)
    assert torch.equal(total[empty].signbit(), before[empty].signbit())
    apart = [each.clone() for each in before]
    assert ops.fp8_grouped_wgrad(*operands, accumulate_into=apart) is apart
    assert all(torch.equal(one, other) for one, other in zip(apart, total, strict=True))
    assert all(torch.equal(ops.fp8_grouped_wgrad(*operands), got) for _ in range(5))


def test_a_gradient_is_that_of_its_expert_alone_and_of_the_dense_product() -> None:
    """Bit for bit, whatever other experts there are: the dense product reads both operands along the tokens too."""
    grad, x, offsets = normal(900, 70), normal(900, 45, seed=1), torch.tensor([3, 300, 300, 880])
    quantized = [ops.quantize_fp8(each, tile=TOKENS, offsets=offsets) for each in (grad, x)]
    got = ops.fp8_grouped_wgrad(*quantized[0], *quantized[1], offsets)
    for expert, rows in ((0, slice(3, 300)), (2, slice(300, 880))):
        a, a_scale = ops.quantize_fp8(grad[rows], tile=TOKENS)
        b, b_scale = ops.quantize_fp8(x[rows], tile=TOKENS)
        views = [each.t() for each in (a, a_scale, b, b_scale)]
        assert torch.equal(ops.fp8_gemm(*views, out_dtype=torch.float32), got[expert])
        copies = [each.contiguous() for each in views]
        assert torch.equal(ops.fp8_gemm(*copies, out_dtype=torch.float32), got[expert])


def test_memory_that_was_nan_does_not_shine_through() -> None:
    """H17: 4 experts, tokens [3, 0, 0, 1]; and all counts 0."""
    for counts in ([3, 0, 0, 1], [0, 0, 0, 0]):
        operands = wgrad_operands(counts, 5, 6)
        stale = torch.full((4, 5, 6), float("nan"))
        torch.ops.grpo_mc.fp8_grouped_wgrad_(stale.unbind(), *operands, False)
        assert stale.isfinite().all() and not stale[1:3].any()


def test_one_huge_tile_does_not_swallow_the_others() -> None:
    grad, grad_scale, x, x_scale, offsets = wgrad_operands([700, 20], 20, 30)
    grad_scale[2] *= 1e4
    want = reference.fp8_grouped_wgrad(grad, grad_scale, x, x_scale, offsets, out_dtype=torch.float64)
    got = ops.fp8_grouped_wgrad(grad, grad_scale, x, x_scale, offsets)
    assert isinstance(want, Tensor) and isinstance(got, Tensor)
    assert_close(got, want, FP8_SUMS / 3)


def test_a_nan_stays_in_its_expert_row_and_column() -> None:
    grad, grad_scale, x, x_scale, offsets = wgrad_operands([30, 40], 20, 30)
    grad.view(torch.uint8)[35, 4] = 0x7F
    x.view(torch.uint8)[2, 9] = 0xFF
    spoilt = torch.zeros(2, 20, 30, dtype=torch.bool)
    spoilt[1, 4], spoilt[0, :, 9] = True, True
    got = ops.fp8_grouped_wgrad(grad, grad_scale, x, x_scale, offsets)
    assert isinstance(got, Tensor) and torch.equal(got.isnan(), spoilt)


def test_strided_operands_and_strided_sums() -> None:
    operands = wgrad_operands([60, 0, 140], 36, 50)
    want = ops.fp8_grouped_wgrad(*operands)
    assert isinstance(want, Tensor)
    turned = [each.t().contiguous().t() for each in operands[:4]]
    assert torch.equal(ops.fp8_grouped_wgrad(*turned, operands[4]), want)
    wide = torch.zeros(200, 70, dtype=torch.uint8)
    wide[:, 9:45] = operands[0].view(torch.uint8)
    sliced = wide[:, 9:45].view(torch.float8_e4m3fn)
    total = torch.zeros(3, 36, 60)[:, :, 5:55]
    ops.fp8_grouped_wgrad(sliced, *operands[1:], accumulate_into=total)
    assert torch.equal(total, want)


def test_results_do_not_depend_on_threads() -> None:
    """Many small experts and a large one, in every product; also when the decoded rows need several waves."""
    counts = [5, 0, 17, 1300, 9, *[3] * 30]
    offsets = offsets_of(counts)
    rows, results = sum(counts), []
    weights = [ops.quantize_fp8(normal(70, 3000, seed=e), tile=(128, 128)) for e in range(len(counts))]
    b, b_scale = (torch.stack(list(parts)) for parts in zip(*weights, strict=True))
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            forward = ops.fp8_grouped_gemm(*ops.quantize_fp8(normal(rows, 3000)), b, b_scale, offsets)
            grad = ops.quantize_fp8(normal(rows, 70), tile=TOKENS, offsets=offsets)
            back = ops.fp8_grouped_gemm(
                *ops.quantize_fp8(normal(rows, 70)), b.transpose(1, 2), b_scale.transpose(1, 2), offsets
            )
            x = ops.quantize_fp8(normal(rows, 90, seed=1), tile=TOKENS, offsets=offsets)
            results.append((forward, back, *grad, ops.fp8_grouped_wgrad(*grad, *x, offsets)))
    finally:
        torch.set_num_threads(threads)
    for others in results[1:]:
        assert all(torch.equal(one.float(), two.float()) for one, two in zip(results[0], others, strict=True))


def test_the_input_gradient_reads_the_weights_along_the_other_axis() -> None:
    """b as a view [E, K, N] of the forward pass's codes [E, N, K], with the scales turned too; few rows as many."""
    offsets = offsets_of([40, 0, 5, 129])
    weights = [ops.quantize_fp8(normal(130, 200, seed=e), tile=(128, 128)) for e in range(4)]
    b, b_scale = (torch.stack(list(parts)).transpose(1, 2) for parts in zip(*weights, strict=True))
    a, a_scale = ops.quantize_fp8(normal(174, 130))
    a_scale, b_scale = (
        distinct(a_scale, 31),
        distinct(b_scale.contiguous(), 7).transpose(1, 2).contiguous().transpose(1, 2),
    )
    got = ops.fp8_grouped_gemm(a, a_scale, b, b_scale, offsets, out_dtype=torch.float32)
    assert_close(got, reference.fp8_grouped_gemm(a, a_scale, b, b_scale, offsets, out_dtype=torch.float64), FP8_SUMS)
    dense = ops.fp8_gemm(a[:5], a_scale[:5], b[1], b_scale[1], out_dtype=torch.float32)
    assert_close(dense, reference.fp8_gemm(a[:5], a_scale[:5], b[1], b_scale[1], out_dtype=torch.float64), FP8_SUMS)


F8 = torch.float8_e4m3fn


def skip_where_the_kernel_looks(offsets: Tensor | None) -> None:
    if os.environ.get("GRPO_MC_TEST_CUDA") and offsets is not None and offsets.dtype == torch.int64 and len(offsets):
        pytest.skip("on a GPU the kernel looks at the offsets, and ends the process")


def wgrad(at: int, value: Any) -> None:
    """A right call with one argument replaced."""
    skip_where_the_kernel_looks(value if at == 4 else None)
    operands: list[Any] = list(wgrad_operands([1, 2], 4, 5))
    operands[at] = value
    ops.fp8_grouped_wgrad(*operands)


def accumulate(value: Any) -> None:
    ops.fp8_grouped_wgrad(*wgrad_operands([1, 2], 4, 5), accumulate_into=value)


def quantize(offsets: Tensor, tile: tuple[int, int] = TOKENS) -> None:
    skip_where_the_kernel_looks(offsets if tile == TOKENS else None)
    ops.quantize_fp8(torch.ones(3, 3), tile=tile, offsets=offsets)


def dequantize(scale: Tensor, offsets: list[int]) -> None:
    ops.dequantize_fp8(torch.ones(3, 3).to(F8), scale, tile=TOKENS, offsets=torch.tensor(offsets))


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: quantize(torch.tensor([0, 3]), (1, 128)), r"tile \(1, 128\); they go with \(128, 1\)"),
        (lambda: quantize(torch.tensor([0.0, 3])), "offsets has dtype Float"),
        (lambda: quantize(torch.zeros(0).long()), r"it must be \[E \+ 1\]"),
        (lambda: dequantize(torch.ones(1, 3), [0, 1, 3]), r"must be \[2, 3\]"),
        (lambda: wgrad(0, torch.ones(4, 4).to(F8)), r"grad is \[4, 4\] and x \[3, 5\]"),
        (lambda: wgrad(0, torch.ones(3, 4)), "grad has dtype Float"),
        (lambda: wgrad(1, torch.ones(1, 4)), r"grad_scale has shape \[1, 4\]; it must be \[2, 4\]"),
        (lambda: wgrad(3, torch.ones(2, 5).double()), "x_scale has dtype Double"),
        (lambda: wgrad(4, torch.tensor([0, 2, 1])), r"offsets\[1\] is 2"),
        (lambda: accumulate(torch.zeros(3, 4, 5)), "accumulate_into has 3 experts and offsets 2"),
        (lambda: accumulate(torch.zeros(2, 5)), r"accumulate_into has shape \[2, 5\]; it must be \[E, N, K\]"),
        (lambda: accumulate([torch.zeros(4, 5), torch.zeros(4, 6)]), r"is Float \[4, 6\]; it must be \[4, 5\]"),
        (lambda: accumulate(torch.zeros(2, 4, 5).double()), "out_dtype is Double"),
        (lambda: accumulate(torch.zeros(2, 4, 5, requires_grad=True)), "needs a gradient"),
        (lambda: accumulate([torch.zeros(4, 5)] * 2), "of expert 1 shares memory with that of expert 0"),
        (lambda: ops.fp8_grouped_wgrad(*wgrad_operands([1], 4, 5), out_dtype=torch.float64), "out_dtype is Double"),
    ],
)
def test_bad_input_is_named(call: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.skipif("GRPO_MC_TEST_CUDA" in os.environ, reason="a look at offsets on a GPU would wait for it")
def test_offsets_that_fall_or_leave_the_matrix_are_named() -> None:
    with pytest.raises(ValueError, match="go from 0 to 4; there are rows 0 to 3"):
        quantize(torch.tensor([0, 4]))
    with pytest.raises(ValueError, match=r"offsets\[1\] is 2 and"):
        quantize(torch.tensor([0, 2, 1]))


def test_opcheck() -> None:
    """All four tests of opcheck; FP8 inputs cannot be compared by its schema test, so that is done here."""
    x, offsets = normal(130, 14), torch.tensor([1, 1, 120, 129])
    torch.library.opcheck(torch.ops.grpo_mc.quantize_fp8.default, (x, *TOKENS, False, offsets))
    operands = wgrad_operands([2, 0, 5], 20, 13)
    before = [each.clone() for each in operands]
    out = list(torch.zeros(3, 20, 13).unbind())
    others = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.grpo_mc.fp8_grouped_wgrad_.default, (out, *operands, True), test_utils=others)
    for each, kept in zip(operands, before, strict=True):
        assert torch.equal(each.view(torch.uint8), kept.view(torch.uint8))
    q, scale = ops.quantize_fp8(x, tile=TOKENS, offsets=offsets)
    arguments = (q, scale, *TOKENS, torch.bfloat16, offsets)
    torch.library.opcheck(torch.ops.grpo_mc.dequantize_fp8.default, arguments, test_utils=others)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 300), min_size=1, max_size=5), st.integers(0, 40), st.integers(0, 40), st.integers(0, 3),
    st.sampled_from((torch.float32, torch.bfloat16)), st.booleans(), st.integers(0, 2**31),
)  # fmt: skip
def test_random_shapes(
    counts: list[int], n: int, k: int, before: int, dtype: torch.dtype, turned: bool, seed: int
) -> None:
    offsets, rows = offsets_of(counts, before), sum(counts) + before
    grad, x = normal(rows, n, seed=seed, dtype=dtype), normal(rows, k, seed=seed + 1, dtype=dtype)
    if turned:
        grad, x = grad.t().contiguous().t(), x.t().contiguous().t()
    quantized = []
    for each in (grad, x):
        q, scale = ops.quantize_fp8(each, tile=TOKENS, offsets=offsets)
        want_q, want_scale = reference.quantize_fp8(each, tile=TOKENS, offsets=offsets)
        assert torch.equal(q.float(), want_q.float()) and torch.equal(scale, want_scale)
        quantized += [q, scale]
    want = reference.fp8_grouped_wgrad(*quantized, offsets, out_dtype=torch.float64)
    got = ops.fp8_grouped_wgrad(*quantized, offsets)
    assert isinstance(want, Tensor) and isinstance(got, Tensor)
    assert_close(got, want, FP8_SUMS, (counts, n, k))


def laid_out(x: Tensor, layout: tuple[int, int, int, bool]) -> Tensor:
    """x with its entries elsewhere: steps between rows and columns, an offset, axes turned; 0xff in the gaps."""
    row_step, column_step, start, turned = layout
    source = x.t() if turned else x
    rows, columns = source.shape
    wide = torch.full((rows * row_step + 1, columns * column_step + start + 9, x.element_size()), 0xFF).byte()
    space = wide.view(x.dtype).squeeze(-1)
    view = space[: rows * row_step : row_step, start : start + columns * column_step : column_step]
    view.copy_(source)
    return view.t() if turned else view


LAYOUT = st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(0, 9), st.booleans())


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 200), min_size=1, max_size=4), st.integers(0, 40), st.integers(0, 40), st.integers(0, 3),
    st.lists(LAYOUT, min_size=5, max_size=5), st.integers(0, 2**31),
)  # fmt: skip
def test_random_strides(counts: list[int], n: int, k: int, before: int, layouts: list[Any], seed: int) -> None:
    """Operands, scales and what is added to lie anyhow: the bits are those of adjacent ones, and no gap is touched.

    Up to 8 outputs are summed in another order where x has its tokens adjacent.
    """
    *operands, offsets = wgrad_operands(counts, n, k, before=before, after=2)
    start = normal(len(counts), n, k, seed=seed)
    want = ops.fp8_grouped_wgrad(*operands, offsets, accumulate_into=start.clone())
    assert isinstance(want, Tensor)
    exact = reference.fp8_grouped_wgrad(*operands, offsets, out_dtype=torch.float64)
    assert isinstance(exact, Tensor)
    assert_close(want, start.double() + exact, FP8_SUMS, (counts, n, k))
    moved = [laid_out(each, layout) for each, layout in zip(operands, layouts, strict=False)]
    row_step, _, first, _ = layouts[4]
    into = [laid_out(each, (row_step, 1, first, False)) for each in start]
    spaces = [torch.as_strided(each, (each.untyped_storage().nbytes() // 4,), (1,), 0) for each in into]
    gaps = [space.isnan() for space in spaces]
    ops.fp8_grouped_wgrad(*moved, offsets, accumulate_into=into)
    for each, space, gap, target in zip(into, spaces, gaps, want, strict=True):
        assert torch.equal(space.isnan(), gap)
        assert torch.equal(each, target) if n > 8 else relative_error(each, target) <= FP8_SUMS


@pytest.mark.parametrize("m, n, k", [(7, 40, 700), (150, 260, 513), (516, 33, 1024)])
def test_every_row_and_block_has_a_scale_of_its_own(m: int, n: int, k: int) -> None:
    """No two scales of an operand are alike, so whichever is taken for another shows."""

    def own(scale: Tensor, seed: int) -> Tensor:
        order = torch.randperm(scale.numel(), generator=torch.Generator().manual_seed(seed))
        return ((1.0 + order / scale.numel()) / 16).view(scale.shape)

    for tile in ((128, 128), (1, 128)):
        a, a_scale = ops.quantize_fp8(normal(m, k))
        b, b_scale = ops.quantize_fp8(normal(n, k, seed=1), tile=tile)
        dense = (a, own(a_scale, 1), b, own(b_scale, 2))
        want = reference.fp8_gemm(*dense, out_dtype=torch.float64)
        assert_close(ops.fp8_gemm(*dense, out_dtype=torch.float32), want, FP8_SUMS, ("gemm", tile))
        offsets = offsets_of([m // 3, 0, m - m // 3])
        grouped = (
            *dense[:2],
            b.view(torch.uint8).expand(3, n, k).view(b.dtype),
            own(b_scale.expand(3, *b_scale.shape), 3),
        )
        want = reference.fp8_grouped_gemm(*grouped, offsets, out_dtype=torch.float64)
        got = ops.fp8_grouped_gemm(*grouped, offsets, out_dtype=torch.float32)
        assert_close(got, want, FP8_SUMS, ("grouped", tile))
    offsets = offsets_of([k // 3, 0, k - k // 3])
    grad, grad_scale = ops.quantize_fp8(normal(k, m), tile=TOKENS, offsets=offsets)
    x, x_scale = ops.quantize_fp8(normal(k, n, seed=1), tile=TOKENS, offsets=offsets)
    operands = (grad, own(grad_scale, 4), x, own(x_scale, 5), offsets)
    got, exact = ops.fp8_grouped_wgrad(*operands), reference.fp8_grouped_wgrad(*operands, out_dtype=torch.float64)
    assert isinstance(got, Tensor) and isinstance(exact, Tensor)
    assert_close(got, exact, FP8_SUMS, "wgrad")
