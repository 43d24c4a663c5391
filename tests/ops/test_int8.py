"""8-bit codes: by hand, against the reference, what feedback keeps. What both widths share is tested with 4 bits."""

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
from helpers.compare import assert_close, relative_error


def normal(numel: int, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def test_by_hand() -> None:
    """max 254: scale 2. 3 -> 1.5, a tie that goes to the even 2; 5 -> 2.5 -> 2; -7 -> -3.5 -> -4; nothing is -128."""
    x = torch.zeros(32)
    x[:5] = torch.tensor([254.0, 3.0, 5.0, -7.0, -254.0])
    codes, scale = ops.quantize_int8(x, block=32)
    assert scale.tolist() == [2.0] and codes.dtype == torch.int8
    assert codes[0].tolist() == [127, 2, 2, -4, -127] + [0] * 27
    assert ops.dequantize_int8(codes, scale, shape=(5,)).tolist() == [254.0, 4.0, 4.0, -8.0, -254.0]


@pytest.mark.parametrize("hadamard", (False, True))
@pytest.mark.parametrize("rounding", ("nearest", "stochastic"))
@pytest.mark.parametrize("n, block", [(0, 32), (1, 128), (127, 128), (1000, 128), (5000, 2048)])
def test_matches_the_reference(n: int, block: int, rounding: str, hadamard: bool) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = normal(n, seed=n).to(dtype)
        ours, theirs = int4_error(x, block=block), int4_error(x, block=block)
        for step in range(3):
            options = dict(block=block, rounding=rounding, hadamard=hadamard, seed=2**40 + 3, offset=step * n)
            got = ops.quantize_int8(x, error=ours, **options)  # type: ignore[arg-type]
            want = reference.quantize_int8(x, error=theirs, **options)  # type: ignore[arg-type]
            if not hadamard:  # the transform rounds in another order, so a code may fall to the other side of a tie
                assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
                assert torch.equal(ours.codes, theirs.codes) and torch.equal(ours.scale, theirs.scale)
            assert_close(got[1], want[1], 1e-6, "scale")
            assert ((got[0].int() - want[0].int()).abs() <= 1).all()
            back = ops.dequantize_int8(*got, shape=x.shape, hadamard=hadamard)
            assert_close(back, reference.dequantize_int8(*got, shape=x.shape, hadamard=hadamard), 1e-6, "decoded")
            theirs = Int4Error(ours.codes.clone(), ours.scale.clone())


def test_sums_over_many_steps() -> None:
    """One large entry hides the others of its block; feedback lets them out after some steps."""
    x = normal(1 << 14)
    x[::128] = 400.0
    error, kept, lost = int4_error(x), torch.zeros_like(x), torch.zeros_like(x)
    for _ in range(64):
        kept += ops.dequantize_int8(*ops.quantize_int8(x, error=error), shape=x.shape)
        lost += ops.dequantize_int8(*ops.quantize_int8(x), shape=x.shape)
    small = torch.arange(len(x)) % 128 != 0
    with_feedback, without = (relative_error(total[small], 64 * x[small]) ** 2 for total in (kept, lost))
    assert with_feedback <= 1e-3 < 0.1 < without


@pytest.mark.parametrize("bad", (float("nan"), float("inf"), -float("inf")))
def test_a_bad_block_is_seen_and_poisons_nothing(bad: float) -> None:
    x = normal(384)
    error = int4_error(x)
    ops.quantize_int8(x, error=error)
    before = error.codes.clone(), error.scale.clone()
    x[130] = bad
    codes, scale = ops.quantize_int8(x, error=error)
    assert scale.isnan().tolist() == [False, True, False] and not codes[1].any()
    assert ops.dequantize_int8(codes, scale, shape=(384,)).isnan().view(3, 128).all(1).tolist() == [False, True, False]
    assert torch.equal(error.codes[1], before[0][1]) and error.scale[1] == before[1][1]
    assert error.scale.isfinite().all() and not torch.equal(error.codes[0], before[0][0])


def test_threads_do_not_change_a_bit() -> None:
    x, threads, results = normal(300_001), torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            error = int4_error(x)
            coded = ops.quantize_int8(x, rounding="stochastic", hadamard=True, error=error)
            results.append((*coded, *error, ops.dequantize_int8(*coded, shape=x.shape, hadamard=True)))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


def test_bad_input_is_named() -> None:
    coded = ops.quantize_int8(torch.ones(8))
    for words, call in {
        "quantize_int8: block is 33": lambda: ops.quantize_int8(torch.ones(3), block=33),
        "quantize_int8: rounding is 'up'": lambda: ops.quantize_int8(torch.ones(3), rounding="up"),
        r"codes are Byte .* must be Char \[1, 128\]": lambda: ops.dequantize_int8(
            torch.zeros(1, 128, dtype=torch.uint8), torch.ones(1), shape=(3,)
        ),
        r"codes have shape \[3\]; they must be \[B, block\]": lambda: ops.dequantize_int8(
            torch.ones(3), torch.ones(3), shape=(3,)
        ),
        "dequantize_int8: add_to has shape": lambda: ops.dequantize_int8(*coded, shape=(3,), add_to=torch.ones(4)),
    }.items():
        with pytest.raises(ValueError, match=words):
            call()


def test_opcheck() -> None:
    x = normal(300)
    for stochastic, hadamard in itertools.product((False, True), repeat=2):
        torch.library.opcheck(
            torch.ops.grpo_mc.quantize_int8.default, (x, *int4_error(x), 128, stochastic, hadamard, 3, 4)
        )
    torch.library.opcheck(torch.ops.grpo_mc.quantize_int8.default, (x, None, None, 64, False, False, 0, 0))
    codes, scale = ops.quantize_int8(x)
    torch.library.opcheck(torch.ops.grpo_mc.dequantize_int8_.default, (torch.ones(300), codes, scale, 128, True, True))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2000), st.sampled_from((32, 64, 128, 2048)), st.sampled_from(("nearest", "stochastic")),
    st.floats(-30, 30), st.integers(0, 2**62),
)  # fmt: skip
def test_random_sizes(n: int, block: int, rounding: str, exponent: float, seed: int) -> None:
    x = normal(n, seed=seed % 1000) * 10**exponent
    options = dict(block=block, rounding=rounding, seed=seed, offset=seed // 3)
    got, want = ops.quantize_int8(x, **options), reference.quantize_int8(x, **options)  # type: ignore[arg-type]
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
