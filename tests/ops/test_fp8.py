"""FP8 with a scale per tile: rounding against torch's cast, every tricky tile, products against float64."""

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
from helpers.compare import FP8_SUMS, assert_close

TILES = ((1, 128), (128, 1), (128, 128))
NAN, INF = float("nan"), float("inf")


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def bits(codes: Tensor) -> Tensor:
    """Codes as integers, both NaNs as one."""
    raw = codes.view(torch.uint8)
    return torch.where((raw & 0x7F) == 0x7F, torch.tensor(0x7F, dtype=torch.uint8), raw)


def assert_same(x: Tensor, tile: tuple[int, int], power_of_two: bool = False) -> tuple[Tensor, Tensor]:
    """Bit for bit the reference's codes and scales."""
    q, scale = ops.quantize_fp8(x, tile=tile, power_of_two=power_of_two)
    want_q, want_scale = reference.quantize_fp8(x, tile=tile, power_of_two=power_of_two)
    assert q.shape == x.shape and q.dtype == torch.float8_e4m3fn
    assert torch.equal(scale.nan_to_num(-1), want_scale.nan_to_num(-1))
    assert torch.equal(bits(q), bits(want_q))
    for dtype in (torch.float32, torch.bfloat16):
        got = ops.dequantize_fp8(q, scale, tile=tile, dtype=dtype)
        want = reference.dequantize_fp8(q, scale, tile=tile, dtype=dtype)
        assert torch.equal(got.nan_to_num(-1), want.nan_to_num(-1)) and torch.equal(got.isnan(), want.isnan())
    return q, scale


def test_by_hand() -> None:
    """amax 896: scale 2. 3 -> 1.5; 17 -> 8.5, a tie between 8 and 9 that goes to the even 8; 19 -> 9.5, to 10."""
    x = torch.tensor([[896.0, 3.0, 17.0, -19.0, 0.0, -0.0]])
    q, scale = ops.quantize_fp8(x)
    assert scale.tolist() == [[2.0]]
    assert q.float().tolist() == [[448.0, 1.5, 8.0, -10.0, 0.0, 0.0]]
    assert q.view(torch.uint8)[0, -1] == 0x80  # minus zero stays
    assert ops.dequantize_fp8(q, scale).tolist() == [[896.0, 3.0, 16.0, -20.0, 0.0, 0.0]]


def test_every_number_rounds_as_torch_casts() -> None:
    """With 448 in each tile the scale is 1: all bfloat16 numbers up to 448, and ties and neighbours of every code."""
    small = torch.arange(0x43E1, dtype=torch.int16).view(torch.bfloat16).float()
    codes = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (codes[1:] + codes[:-1]) / 2
    exact = torch.cat([codes, ties, torch.nextafter(ties, ties * 0), torch.nextafter(ties, ties + 1), small])
    exact = torch.cat([exact, -exact])
    rows = torch.nn.functional.pad(exact, (0, -len(exact) % 127)).view(-1, 127)
    x = torch.cat([rows, torch.full((len(rows), 1), 448.0)], 1)
    q, scale = ops.quantize_fp8(x)
    assert (scale == 1).all()
    assert torch.equal(q.view(torch.uint8), x.to(torch.float8_e4m3fn).view(torch.uint8))


def test_every_code_is_decoded() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(2, 128)
    q = codes.view(torch.float8_e4m3fn)
    got = ops.dequantize_fp8(q, torch.ones(2, 1))
    assert torch.equal(got.nan_to_num(9e9), q.float().nan_to_num(9e9))
    assert got.isnan().nonzero().tolist() == [[0, 127], [1, 127]]


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(
    "shape", [(1, 1), (1, 64), (3, 127), (130, 129), (303, 300), (0, 5), (5, 0), (256, 256), (2, 7296)]
)
def test_shapes(tile: tuple[int, int], shape: tuple[int, int]) -> None:
    for dtype, power_of_two in itertools.product((torch.float32, torch.bfloat16, torch.float16), (False, True)):
        q, scale = assert_same(normal(*shape, dtype=dtype), tile, power_of_two)
        assert scale.shape == (-(-shape[0] // tile[0]), -(-shape[1] // tile[1]))


@pytest.mark.parametrize("tile", TILES)
def test_magnitudes(tile: tuple[int, int]) -> None:
    x = normal(140, 300)
    for factor in (1e-45, 1e-40, 1e-38, 1e-28, 1e-3, 1e30, 3e37):
        q, scale = assert_same(x * factor, tile)
        assert scale.isfinite().all() and (scale > 0).all()
    q, scale = assert_same(torch.zeros(140, 300), tile)
    assert not q.float().any() and (scale == 2.0**-126).all()
    assert_same(torch.full((130, 130), torch.finfo(torch.bfloat16).max, dtype=torch.bfloat16), tile)
    assert_same(torch.full((130, 130), torch.finfo(torch.float32).max), tile, True)


def test_a_tile_of_zeros_stays_finite() -> None:
    """H14: zeros with one 1 gave 49,152 NaN."""
    x = torch.zeros(256, 256)
    x[0, 0] = 1
    q, scale = assert_same(x, (128, 128))
    assert torch.equal(ops.dequantize_fp8(q, scale, tile=(128, 128)), x)
    assert (scale > 0).all() and scale.isfinite().all()
    x = normal(3, 256)
    x[1] = 0
    assert_same(x, (1, 128))


def test_a_power_of_two_is_not_raised() -> None:
    for exponent in (-120, -1, 0, 1, 100):
        x = torch.tensor([[448.0, 1.0], [449.0, 1.0]]) * 2.0**exponent
        _, scale = ops.quantize_fp8(x, power_of_two=True)
        assert scale.flatten().tolist() == [2.0**exponent, 2.0 ** (exponent + 1)]


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("bad", (NAN, -NAN, INF, -INF))
def test_one_bad_number_spoils_its_tile_only(tile: tuple[int, int], bad: float) -> None:
    x = normal(256, 256)
    x[3, 200] = bad
    q, scale = assert_same(x, tile)
    spoilt = torch.zeros(256, 256, dtype=torch.bool)
    first_row, first_column = 3 // tile[0] * tile[0], 200 // tile[1] * tile[1]
    spoilt[first_row : first_row + tile[0], first_column : first_column + tile[1]] = True
    assert torch.equal(q.view(torch.uint8) == 0x7F, spoilt) and torch.equal(q.float().isnan(), spoilt)
    assert int(scale.isnan().sum()) == 1


@pytest.mark.parametrize("tile", TILES)
def test_strides(tile: tuple[int, int]) -> None:
    base = normal(300, 520, dtype=torch.bfloat16)
    for x in (base.t(), base[:, 3:259], base[1::2], base[:, ::2], base[7:, 5:].t()):
        assert_same(x, tile)


def gemm_operands(
    m: int, n: int, k: int, *, wide_b: bool = True, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Operands with a scale of its own for every row and block."""
    a, a_scale = ops.quantize_fp8(normal(m, k, seed=seed))
    b, b_scale = ops.quantize_fp8(normal(n, k, seed=seed + 1), tile=(128, 128) if wide_b else (1, 128))
    a_scale = (1.0 + torch.arange(a_scale.numel()).remainder(37)).view_as(a_scale) / 16
    b_scale = (1.0 + torch.arange(b_scale.numel()).remainder(23)).view_as(b_scale) / 8
    return a, a_scale, b, b_scale


def test_product_by_hand() -> None:
    """Two blocks of the depth with scales of their own: 2 * 3 * 10 * 100 + 4 * 1 * 20 * 200."""
    a, b = torch.zeros(1, 130), torch.zeros(1, 130)
    a[0, 0], b[0, 0], a[0, 129], b[0, 129] = 2, 3, 4, 1
    codes = [x.to(torch.float8_e4m3fn) for x in (a, b)]
    got = ops.fp8_gemm(
        codes[0], torch.tensor([[10.0, 20.0]]), codes[1], torch.tensor([[100.0, 200.0]]), out_dtype=torch.float32
    )
    assert got.tolist() == [[6000.0 + 16000.0]]


@pytest.mark.parametrize("wide_b", (True, False))
@pytest.mark.parametrize(
    "m, n, k",
    [(0, 8, 64), (8, 0, 64), (1, 1, 1), (1, 24, 127), (4, 300, 513), (7, 8, 64), (8, 33, 1152), (9, 31, 128),
     (83, 112, 129), (127, 576, 300), (129, 24, 7168), (255, 130, 16), (516, 40, 260), (1030, 17, 140),
     (7, 128, 576), (3, 5, 127), (129, 257, 129), (0, 128, 128), (4, 8, 0), (40, 8, 0)],  # H15
)  # fmt: skip
def test_products_match_float64(m: int, n: int, k: int, wide_b: bool) -> None:
    operands = gemm_operands(m, n, k, wide_b=wide_b)
    want = reference.fp8_gemm(*operands, out_dtype=torch.float64)
    assert_close(ops.fp8_gemm(*operands, out_dtype=torch.float32), want, FP8_SUMS, (m, n, k))
    assert_close(ops.fp8_gemm(*operands), want, 3e-3, (m, n, k))
    assert ops.fp8_gemm(*operands).dtype == torch.bfloat16


@pytest.mark.parametrize("m", (4, 40))
def test_accumulating(m: int) -> None:
    operands = gemm_operands(m, 70, 200)
    start = normal(m, 140) * 32
    for dtype, bound in ((torch.float32, FP8_SUMS / 3), (torch.bfloat16, 2e-2)):
        total = start.to(dtype)[:, 3:73]  # rows that are not adjacent
        want = total.double()
        for _ in range(10):
            assert ops.fp8_gemm(*operands, accumulate_into=total) is total
            want = want + reference.fp8_gemm(*operands, out_dtype=torch.float64)
        assert_close(total, want, bound, dtype)
    assert torch.equal(ops.fp8_gemm(*(x[:, :0] for x in operands), out_dtype=torch.float32), torch.zeros(m, 70))


@pytest.mark.parametrize("m", (5, 50))
def test_one_huge_block_does_not_swallow_the_others(m: int) -> None:
    """Blocks are summed apart before they meet, so one that is scaled by 1e4 costs the others nothing."""
    a, a_scale, b, b_scale = gemm_operands(m, 40, 1024)
    a_scale[:, 3] *= 1e4
    want = reference.fp8_gemm(a, a_scale, b, b_scale, out_dtype=torch.float64)
    assert_close(ops.fp8_gemm(a, a_scale, b, b_scale, out_dtype=torch.float32), want, FP8_SUMS / 3, m)


@pytest.mark.parametrize("m", (2, 20))
def test_a_nan_code_stays_in_its_row_and_column(m: int) -> None:
    a, a_scale, b, b_scale = gemm_operands(m, 40, 200)
    a.view(torch.uint8)[1, 150] = 0x7F
    b.view(torch.uint8)[30, 10] = 0xFF
    out = ops.fp8_gemm(a, a_scale, b, b_scale)
    spoilt = torch.zeros(m, 40, dtype=torch.bool)
    spoilt[1], spoilt[:, 30] = True, True
    assert torch.equal(out.isnan(), spoilt)


def test_results_do_not_depend_on_threads_and_few_changes_of_rows() -> None:
    operands = gemm_operands(600, 200, 700)
    x = normal(300, 700)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            few = ops.fp8_gemm(operands[0][:5], operands[1][:5], *operands[2:], out_dtype=torch.float32)
            results.append((ops.fp8_gemm(*operands, out_dtype=torch.float32), few, *ops.quantize_fp8(x)))
    finally:
        torch.set_num_threads(threads)
    for one, two in zip(*results, strict=True):
        assert torch.equal(one.float(), two.float())
    alone = ops.fp8_gemm(operands[0][520:], operands[1][520:], *operands[2:], out_dtype=torch.float32)
    assert torch.equal(alone, results[0][0][520:])


def test_strided_operands() -> None:
    a, a_scale, b, b_scale = gemm_operands(20, 36, 300)
    wide = torch.zeros(20, 400, dtype=torch.uint8)
    wide[:, 50:350] = a.view(torch.uint8)
    strided = wide[:, 50:350].view(torch.float8_e4m3fn)
    want = ops.fp8_gemm(a, a_scale, b, b_scale)
    assert torch.equal(ops.fp8_gemm(strided, a_scale.t().contiguous().t(), b, b_scale), want)
    assert torch.equal(ops.fp8_gemm(a, a_scale, b.t().contiguous().t(), b_scale), want)


@pytest.mark.parametrize(
    "tokens, n, k", [(7, 300, 130), (5, 8, 200), (300, 129, 257), (1, 1, 1), (0, 4, 5), (700, 3, 9)]
)
def test_the_three_products_of_a_linear_layer(tokens: int, n: int, k: int) -> None:
    """Forward, input's and weight's gradient, every operand read as it was quantised: views, nothing is copied."""
    x, weight, grad = normal(tokens, k), normal(n, k, seed=1), normal(tokens, n, seed=2)
    b, b_scale = ops.quantize_fp8(weight, tile=(128, 128))
    forward = (*ops.quantize_fp8(x), b, b_scale)
    dgrad = (*ops.quantize_fp8(grad), b.t(), b_scale.t())
    wgrad = tuple(each.t() for part in (grad, x) for each in ops.quantize_fp8(part, tile=(128, 1)))
    exact = (x.double() @ weight.double().t(), grad.double() @ weight.double(), grad.double().t() @ x.double())
    for operands, plain in zip((forward, dgrad, wgrad), exact, strict=True):
        scales = [(1.0 + torch.arange(s.numel()).remainder(29)).view(s.shape) / 16 for s in operands[1::2]]
        distinct = (operands[0], scales[0], operands[2], scales[1].t().contiguous().t())
        want = reference.fp8_gemm(*distinct, out_dtype=torch.float64)
        assert_close(ops.fp8_gemm(*distinct, out_dtype=torch.float32), want, FP8_SUMS, (tokens, n, k))
        got = ops.fp8_gemm(*operands, out_dtype=torch.float32)
        assert_close(got, plain, 0.06, (tokens, n, k))  # the rounding to FP8
        total = torch.ones_like(got)
        ops.fp8_gemm(*operands, accumulate_into=total)
        assert_close(total, got + 1, 1e-6, (tokens, n, k))


def grouped_operands(
    counts: list[int], n: int, k: int, *, wide_b: bool, before: int = 0, after: int = 0
) -> tuple[Tensor, ...]:
    """Operands of experts with so many rows each, and rows of no expert before and after, which hold NaN."""
    rows = before + sum(counts) + after
    a, a_scale, _, _ = gemm_operands(rows, 1, k)
    per_expert = [gemm_operands(1, n, k, wide_b=wide_b, seed=e)[2:] for e in range(len(counts))]
    b, b_scale = (torch.stack(list(parts)) for parts in zip(*per_expert, strict=True))
    for rest in (slice(0, before), slice(rows - after, rows)):
        a.view(torch.uint8)[rest] = 0x7F
    return a, a_scale, b, b_scale, before + torch.tensor([0, *counts]).cumsum(0)


@pytest.mark.parametrize("wide_b", (True, False))
@pytest.mark.parametrize(
    "counts",
    [[0], [0, 0, 70], [128, 0, 127, 129, 1], [3, 9, 0, 5], [1] * 64, [600, 0]],
    ids=lambda counts: str(counts[:5]),
)
def test_experts_match_float64(counts: list[int], wide_b: bool) -> None:
    operands = grouped_operands(counts, 40, 200, wide_b=wide_b, before=2, after=3)
    got = ops.fp8_grouped_gemm(*operands, out_dtype=torch.float32)
    want = reference.fp8_grouped_gemm(*operands, out_dtype=torch.float64)
    assert_close(got, want, FP8_SUMS, counts)
    assert not got[:2].any() and not got[-3:].any()
    total = torch.ones_like(got)
    assert ops.fp8_grouped_gemm(*operands, accumulate_into=total) is total
    assert_close(total, want + 1, FP8_SUMS, counts)
    assert all(torch.equal(ops.fp8_grouped_gemm(*operands, out_dtype=torch.float32), got) for _ in range(5))


F8 = torch.float8_e4m3fn


def grouped(offsets: list[int]) -> Tensor:
    if os.environ.get("GRPO_MC_TEST_CUDA") and len(offsets) == 3:
        pytest.skip("on a GPU the kernel looks at the offsets, and ends the process")
    return ops.fp8_grouped_gemm(*grouped_operands([1, 2], 4, 5, wide_b=True)[:4], torch.tensor(offsets))


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: ops.quantize_fp8(torch.ones(3)), r"quantize_fp8: x has shape \[3\]; it must be \[M, K\]"),
        (lambda: ops.quantize_fp8(torch.ones(3, 3).double()), "x has dtype Double"),
        (lambda: ops.quantize_fp8(torch.ones(3, 3), tile=(1, 64)), r"tile is \(1, 64\); it must be \(1, 128\)"),
        (lambda: ops.quantize_fp8(torch.ones(3, 3), tile=(1, 1)), "tile is"),
        (lambda: ops.dequantize_fp8(torch.ones(3, 3), torch.ones(3, 1)), "q has dtype Float"),
        (lambda: ops.dequantize_fp8(torch.ones(3, 3).to(F8), torch.ones(3, 2)), r"must be \[3, 1\]"),
        (lambda: ops.dequantize_fp8(torch.ones(3, 3).to(F8), torch.ones(3, 1), dtype=torch.float16), "dtype is Half"),
        (
            lambda: ops.fp8_gemm(*gemm_operands(3, 4, 5)[:2], torch.ones(4, 6).to(F8), torch.ones(1, 1)),
            "a is .3, 5. and b",
        ),
        (
            lambda: ops.fp8_gemm(torch.ones(3, 5).to(F8), torch.ones(3, 2), *gemm_operands(3, 4, 5)[2:]),
            "a_scale has shape",
        ),
        (lambda: ops.fp8_gemm(*gemm_operands(3, 4, 5)[:3], torch.ones(2, 1)), "b_scale has shape"),
        (lambda: ops.fp8_gemm(torch.ones(3, 5), torch.ones(3, 1), *gemm_operands(3, 4, 5)[2:]), "a has dtype Float"),
        (lambda: ops.fp8_gemm(*gemm_operands(3, 4, 5), out_dtype=torch.float64), "out_dtype is Double"),
        (lambda: ops.fp8_gemm(*gemm_operands(3, 4, 5), accumulate_into=torch.ones(4, 4)), "accumulate_into is Float"),
        (lambda: grouped([0, 2]), "offsets has shape"),
        (lambda: grouped([0, 3, 2]), r"offsets\[1\] is 3 and offsets\[2\] is 2"),
        (lambda: grouped([0, 2, 4]), "offsets go from 0 to 4; there are rows 0 to 3"),
    ],
)
def test_bad_input_is_named(call: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()  # type: ignore[operator]


def check_op(op: Any, *arguments: Any) -> None:
    """opcheck; torch cannot compare FP8 inputs before and after, which its schema test does, so that is done here."""
    before = [argument.clone() if isinstance(argument, Tensor) else None for argument in arguments]
    op(*arguments)
    for at, (argument, kept) in enumerate(zip(arguments, before, strict=True)):
        if kept is not None and op._schema.arguments[at].alias_info is None:
            assert torch.equal(argument.view(torch.uint8), kept.view(torch.uint8)), f"argument {at} was changed"
    others = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(op, arguments, test_utils=others)


def test_opcheck() -> None:
    for tile in TILES:
        x = normal(130, 140)
        torch.library.opcheck(torch.ops.grpo_mc.quantize_fp8.default, (x, *tile, False))
        q, scale = ops.quantize_fp8(x, tile=tile)
        check_op(torch.ops.grpo_mc.dequantize_fp8.default, q, scale, *tile, torch.bfloat16)
    operands = gemm_operands(12, 20, 130)
    check_op(torch.ops.grpo_mc.fp8_gemm_.default, torch.zeros(12, 20), *operands, True)
    experts = grouped_operands([2, 0, 5], 20, 130, wide_b=True)
    check_op(torch.ops.grpo_mc.fp8_grouped_gemm_.default, torch.zeros(7, 20), *experts, False)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 40), st.integers(0, 70), st.integers(0, 400), st.sampled_from(TILES), st.booleans(),
    st.sampled_from((torch.float32, torch.bfloat16)), st.integers(0, 2**31),
)  # fmt: skip
def test_random_shapes(
    m: int, n: int, k: int, tile: tuple[int, int], flag: bool, dtype: torch.dtype, seed: int
) -> None:
    assert_same(normal(m, k, seed=seed, dtype=dtype), tile, flag)
    operands = gemm_operands(m, n, k, wide_b=flag, seed=seed)
    want = reference.fp8_gemm(*operands, out_dtype=torch.float64)
    assert_close(ops.fp8_gemm(*operands, out_dtype=torch.float32), want, FP8_SUMS, (m, n, k))


def test_what_is_added_to_lies_apart_and_autograd_knows() -> None:
    a, a_scale, b, b_scale = gemm_operands(6, 7, 200)
    row = torch.zeros(1, 7)
    with pytest.raises(ValueError, match="its entries must lie apart"):
        ops.fp8_gemm(a, a_scale, b, b_scale, accumulate_into=row.expand(6, 7))
    with pytest.raises(ValueError, match="shares memory with an input"):
        ops.fp8_gemm(a[:1], a_scale[:1], b[:2], b_scale, accumulate_into=a_scale[:1])
    weight = torch.zeros(6, 7, requires_grad=True)
    with pytest.raises(ValueError, match="needs a gradient"):
        ops.fp8_gemm(a, a_scale, b, b_scale, accumulate_into=weight)
    before = weight._version
    with torch.no_grad():
        ops.fp8_gemm(a, a_scale, b, b_scale, accumulate_into=weight)
    assert weight._version > before
