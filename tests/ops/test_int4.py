"""4-bit codes: by hand, against the reference, what feedback keeps, what random rounding averages to."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grpo_mc import ops
from grpo_mc.ops import reference
from grpo_mc.ops.int4 import Int4Error, int4_error
from grpo_mc.ops.reference.int4 import hadamard_matrix
from helpers.compare import assert_close, relative_error

NAN, INF = float("nan"), float("inf")


def normal(*shape: int, seed: int = 0, tails: bool = False) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=draw)
    return x * torch.randn(*shape, generator=draw).abs().clamp_min(0.05).reciprocal() if tails else x


def back(x: Tensor, coded: tuple[Tensor, Tensor], **options: bool) -> Tensor:
    return ops.dequantize_int4(*coded, shape=x.shape, **options)  # type: ignore[arg-type]


def copy(error: Int4Error) -> Int4Error:
    return Int4Error(error.codes.clone(), error.scale.clone())


def test_by_hand() -> None:
    """max 14: scale 2. 3 -> 1.5, a tie that goes to the even 2; 5 -> 2.5 -> 2; -7 -> -3.5 -> -4; nothing is -8."""
    x = torch.zeros(32)
    x[:5] = torch.tensor([14.0, 3.0, 5.0, -7.0, -14.0])
    codes, scale = ops.quantize_int4(x, block=32)
    assert scale.tolist() == [2.0]
    assert codes[0, :3].tolist() == [15 | 10 << 4, 10 | 4 << 4, 1 | 8 << 4] and set(codes[0, 3:].tolist()) == {0x88}
    assert back(x, (codes, scale))[:5].tolist() == [14.0, 4.0, 4.0, -8.0, -14.0]


def test_feedback_by_hand() -> None:
    """Each 1 beside a 70 rounds to 0 and is kept; from the sixth step on the sum passes 5 and a 10 goes out."""
    x = torch.zeros(32)
    x[0], x[1] = 70.0, 1.0
    error, sent = int4_error(x, block=32), torch.zeros(32)
    history = []
    for _ in range(12):
        sent += back(x, ops.quantize_int4(x, block=32, error=error))
        history.append(round(float(sent[1]), 3))
    assert history[:4] == [0, 0, 0, 0] and history[-1] == pytest.approx(10.0)
    assert float(12 * x[1] - sent[1]) == pytest.approx(float(error.codes[0, 1] * error.scale[0]), abs=0.05)


@pytest.mark.parametrize("hadamard", (False, True))
@pytest.mark.parametrize("rounding", ("nearest", "stochastic"))
@pytest.mark.parametrize("n, block", [(0, 32), (1, 128), (127, 128), (128, 128), (1000, 128), (999, 32), (5000, 2048)])
def test_matches_the_reference(n: int, block: int, rounding: str, hadamard: bool) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = normal(n, seed=n).to(dtype)
        ours, theirs = int4_error(x, block=block), int4_error(x, block=block)
        for step in range(3):
            options = dict(block=block, rounding=rounding, hadamard=hadamard, seed=2**40 + 3, offset=step * n)
            got = ops.quantize_int4(x, error=ours, **options)  # type: ignore[arg-type]
            want = reference.quantize_int4(x, error=theirs, **options)  # type: ignore[arg-type]
            got_back, want_back = (back(x, coded, hadamard=hadamard) for coded in (got, want))
            if not hadamard:  # the transform rounds in another order, so a code may fall to the other side of a tie
                assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
                assert torch.equal(ours.codes, theirs.codes) and torch.equal(ours.scale, theirs.scale)
            assert_close(got[1], want[1], 1e-6, "scale")
            assert (got_back - want_back).abs().sum() <= 0.01 * want_back.abs().sum() + 1e-6
            again = reference.dequantize_int4(*got, shape=x.shape, hadamard=hadamard)
            assert_close(got_back, again, 1e-6, "decoded")
            theirs = copy(ours)


def test_the_transform_is_its_own_inverse_and_keeps_lengths() -> None:
    matrix = hadamard_matrix()
    assert torch.allclose(matrix @ matrix, torch.eye(32, dtype=torch.float64))
    one = torch.zeros(32)
    one[5] = 1.0  # transformed: 32 entries of the same size, which 4 bits hold exactly
    assert_close(back(one, ops.quantize_int4(one, block=32, hadamard=True), hadamard=True), one, 1e-6)


@pytest.mark.parametrize("hadamard", (False, True))
def test_nothing_is_lost(hadamard: bool) -> None:
    """x + old error = what is sent + new error, to the error's own 8 bits."""
    x, error = normal(4096, tails=True), int4_error(torch.empty(4096))
    for step in range(4):
        before = (error.codes.float() * error.scale[:, None]).flatten()
        sent = back(x, ops.quantize_int4(x, error=error, hadamard=hadamard), hadamard=hadamard)
        after = (error.codes.float() * error.scale[:, None]).flatten()
        slack = error.scale.repeat_interleave(128) * 0.51 + 1e-5 * x.abs().max()
        assert ((x + before - sent - after).abs() <= slack).all(), step


def test_sums_over_many_steps() -> None:
    """Relative squared error of the sum of 64 steps of one gradient: 1e-4 with feedback, far more without."""
    x = normal(1 << 16, tails=True)
    error, kept, lost = int4_error(x), torch.zeros_like(x), torch.zeros_like(x)
    for _ in range(64):
        kept += back(x, ops.quantize_int4(x, error=error))
        lost += back(x, ops.quantize_int4(x))
    assert relative_error(kept, 64 * x) ** 2 <= 1e-4 < 0.01 < relative_error(lost, 64 * x) ** 2


def test_random_rounding_is_right_on_average_and_keyed() -> None:
    x = torch.linspace(-1, 1, 128)
    total = torch.zeros(128, dtype=torch.float64)
    for seed in range(2000):
        total += back(x, ops.quantize_int4(x, rounding="stochastic", seed=seed)).double()
    step = 1 / 7
    assert ((total / 2000 - x).abs() <= 4 * step / 2 / 2000**0.5).all()
    whole = normal(1024)
    codes, scale = ops.quantize_int4(whole, rounding="stochastic", seed=9, offset=512)
    part = ops.quantize_int4(whole[256:], rounding="stochastic", seed=9, offset=512 + 256)
    assert torch.equal(part[0], codes[2:]) and torch.equal(part[1], scale[2:])
    assert not torch.equal(ops.quantize_int4(whole, rounding="stochastic", seed=10, offset=512)[0], codes)


@pytest.mark.parametrize("bad", (NAN, INF, -INF))
def test_a_bad_block_is_seen_and_poisons_nothing(bad: float) -> None:
    x = normal(384)
    error = int4_error(x)
    ops.quantize_int4(x, error=error)
    before = copy(error)
    x[130] = bad
    codes, scale = ops.quantize_int4(x, error=error)
    assert scale.isnan().tolist() == [False, True, False]
    assert back(x, (codes, scale)).isnan().view(3, 128).all(1).tolist() == [False, True, False]
    assert torch.equal(error.codes[1], before.codes[1]) and error.scale[1] == before.scale[1]
    assert error.scale.isfinite().all() and not torch.equal(error.codes[0], before.codes[0])


def test_extreme_blocks() -> None:
    x = torch.zeros(5, 128)
    x[1, 3], x[2, :], x[3, 0], x[4, :] = 1e30, -3.0, 1e-42, 3e38
    codes, scale = ops.quantize_int4(x)
    assert scale.isfinite().all() and (scale > 0).all()
    got = back(x, (codes, scale))
    assert not got[0].any() and not got[3].any()  # below the smallest scale
    assert torch.allclose(got[1:3], x[1:3]) and torch.allclose(got[4], x[4])
    assert not ((codes & 15) == 0).any() and not ((codes >> 4) == 0).any()  # -8 is never sent


def test_threads_do_not_change_a_bit() -> None:
    x, threads, results = normal(300_001), torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            error = int4_error(x)
            coded = ops.quantize_int4(x, rounding="stochastic", hadamard=True, error=error)
            results.append((*coded, *error, back(x, coded, hadamard=True)))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


def test_adding_and_shapes() -> None:
    x = normal(7, 19, seed=3)
    coded = ops.quantize_int4(x.t())  # memory order of what is given
    assert torch.equal(
        ops.dequantize_int4(*coded, shape=(19, 7)), back(x.t().contiguous(), ops.quantize_int4(x.t().contiguous()))
    )
    total = torch.ones(19, 7)
    assert ops.dequantize_int4(*coded, shape=(19, 7), add_to=total) is total
    assert_close(total, ops.dequantize_int4(*coded, shape=(19, 7)) + 1, 1e-6)
    assert ops.dequantize_int4(*coded, shape=(133,), dtype=torch.bfloat16).dtype == torch.bfloat16
    wire = sum(part.nbytes for part in ops.quantize_int4(torch.ones(1 << 20)))
    assert wire <= (4 << 20) / 7.4


CODED = ops.quantize_int4(torch.ones(8))


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: ops.quantize_int4(torch.ones(3).double()), "x has dtype Double"),
        (lambda: ops.quantize_int4(torch.ones(3), block=33), "block is 33; it must be a multiple of 32"),
        (lambda: ops.quantize_int4(torch.ones(3), block=8192), "block is 8192"),
        (lambda: ops.quantize_int4(torch.ones(3), rounding="up"), "rounding is 'up'; it must be one of"),
        (lambda: ops.quantize_int4(torch.ones(300), error=int4_error(torch.ones(3))), "error codes are Char"),
        (lambda: ops.quantize_int4(torch.ones(3), offset=-1), "offset is -1"),
        (lambda: ops.dequantize_int4(*ops.quantize_int4(torch.ones(300)), shape=(3,)), "codes are Byte"),
        (lambda: ops.dequantize_int4(torch.ones(3), torch.ones(3), shape=(3,)), r"codes have shape \[3\]"),
        (lambda: ops.dequantize_int4(*CODED, shape=(3,), add_to=torch.ones(4)), "add_to has shape"),
        (lambda: ops.dequantize_int4(*CODED, shape=(2, 4), add_to=torch.ones(4, 2).t()), "contiguous"),
    ],
)
def test_bad_input_is_named(call: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()  # type: ignore[operator]


def test_opcheck() -> None:
    x = normal(300)
    for stochastic, hadamard in itertools.product((False, True), repeat=2):
        torch.library.opcheck(
            torch.ops.grpo_mc.quantize_int4.default, (x, *int4_error(x), 128, stochastic, hadamard, 3, 4)
        )
    torch.library.opcheck(torch.ops.grpo_mc.quantize_int4.default, (x, None, None, 64, False, False, 0, 0))
    codes, scale = ops.quantize_int4(x)
    torch.library.opcheck(torch.ops.grpo_mc.dequantize_int4_.default, (torch.ones(300), codes, scale, 128, True, True))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2000), st.sampled_from((32, 64, 128, 2048)), st.sampled_from(("nearest", "stochastic")),
    st.floats(-30, 30), st.integers(0, 2**62),
)  # fmt: skip
def test_random_sizes(n: int, block: int, rounding: str, exponent: float, seed: int) -> None:
    x = normal(n, seed=seed % 1000) * 10**exponent
    options = dict(block=block, rounding=rounding, seed=seed, offset=seed // 3)
    got, want = ops.quantize_int4(x, **options), reference.quantize_int4(x, **options)  # type: ignore[arg-type]
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
