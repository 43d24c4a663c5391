"""rms_norm: the reference over tricky shapes, and results of a row that depend on that row alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_mc import ops
from grpo_mc.ops import reference
from helpers.compare import assert_close

EPS = 1e-5


def make(rows: int, width: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, width, generator=generator), torch.rand(width, generator=generator) + 0.5


def test_by_hand() -> None:
    """mean(x^2) = (9 + 16) / 2 + 3.5 = 16: each entry over 4, times its weight."""
    out = ops.rms_norm(torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0]), 3.5)
    assert out.tolist() == [[0.75, 2.0]]


@pytest.mark.parametrize("rows", (0, 1, 3, 64))
@pytest.mark.parametrize("width", (1, 7, 8, 31, 32, 33, 100, 576, 1025))
def test_matches_the_float64_reference(rows: int, width: int) -> None:
    x, weight = make(rows, width)
    got = ops.rms_norm(x, weight, EPS)
    assert got.shape == x.shape
    assert_close(got, reference.rms_norm(x.double(), weight.double(), EPS), 3e-7, (rows, width))


def test_other_shapes_and_strides() -> None:
    x, weight = make(24, 36)
    assert torch.equal(ops.rms_norm(x.view(2, 3, 4, 36), weight, EPS), ops.rms_norm(x, weight, EPS).view(2, 3, 4, 36))
    assert torch.equal(ops.rms_norm(x[0], weight, EPS), ops.rms_norm(x, weight, EPS)[0])
    assert torch.equal(
        ops.rms_norm(x[:, ::2], weight[::2], EPS), ops.rms_norm(x[:, ::2].clone(), weight[::2].clone(), EPS)
    )
    assert ops.rms_norm(torch.zeros(3, 0), torch.zeros(0), EPS).shape == (3, 0)


def test_a_row_is_the_same_whatever_is_beside_it_and_however_many_threads() -> None:
    x, weight = make(517, 576)
    together = ops.rms_norm(x, weight, EPS)
    for first, last in ((0, 1), (5, 7), (11, 37), (516, 517)):
        assert torch.equal(ops.rms_norm(x[first:last], weight, EPS), together[first:last])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert torch.equal(ops.rms_norm(x, weight, EPS), together)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("scale", (1e-30, 1e-15, 1e15, 1e18))
def test_small_and_large_numbers(scale: float) -> None:
    x, weight = make(4, 64)
    got = ops.rms_norm(x * scale, weight, 0.0 if scale > 1e-20 else EPS)
    want = reference.rms_norm((x * scale).double(), weight.double(), 0.0 if scale > 1e-20 else EPS)
    assert_close(got, want, 1e-6, scale)


def test_nan_and_zeros_stay_in_their_rows() -> None:
    x, weight = make(4, 20)
    x[1, 3], x[2] = torch.nan, 0.0
    out = ops.rms_norm(x, weight, EPS)
    assert out[1].isnan().all() and not out[[0, 2, 3]].isnan().any()
    assert not out[2].any()


@pytest.mark.parametrize(
    "x, weight, words",
    [
        (torch.ones(2, 3), torch.ones(5), r"\[2, 3\] and weight \[5\]"),
        (torch.tensor(1.0), torch.ones(1), r"must be \[..., H\]"),
        (torch.ones(2, 3, dtype=torch.bfloat16), torch.ones(3), "takes Float"),
    ],
)
def test_bad_input_is_named(x: torch.Tensor, weight: torch.Tensor, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ops.rms_norm(x, weight, EPS)


def test_opcheck() -> None:
    torch.library.opcheck(torch.ops.grpo_mc.rms_norm.default, (*make(5, 20), EPS))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 40), st.integers(1, 1200), st.integers(0, 2**31))
def test_random_shapes(rows: int, width: int, seed: int) -> None:
    x, weight = make(rows, width, seed)
    assert_close(
        ops.rms_norm(x, weight, EPS), reference.rms_norm(x.double(), weight.double(), EPS), 5e-7, (rows, width)
    )
