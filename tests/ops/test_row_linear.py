"""row_linear: the reference over tricky shapes, and results of a row that depend on that row alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_mc import ops
from grpo_mc.ops import reference
from helpers.compare import assert_close


def make(rows: int, columns: int, depth: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, depth, generator=generator), torch.randn(columns, depth, generator=generator)


def test_by_hand() -> None:
    x, weight = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0], [0.0, -1.0]])
    assert ops.row_linear(x, weight).tolist() == [[11.0, -2.0]]


@pytest.mark.parametrize("rows", (0, 1, 2, 3, 4, 31, 64))
@pytest.mark.parametrize("columns, depth", [(0, 5), (1, 1), (3, 0), (4, 7), (9, 8), (13, 576), (64, 769), (8, 1537)])
def test_matches_the_float64_reference(rows: int, columns: int, depth: int) -> None:
    x, weight = make(rows, columns, depth)
    got = ops.row_linear(x, weight)
    assert got.shape == (rows, columns)
    assert_close(got, reference.row_linear(x.double(), weight.double()), 1e-6, (rows, columns, depth))


def test_a_row_is_the_same_whatever_is_beside_it() -> None:
    x, weight = make(37, 50, 900)
    together = ops.row_linear(x, weight)
    for first, last in ((0, 1), (5, 7), (11, 37), (36, 37)):
        assert torch.equal(ops.row_linear(x[first:last], weight), together[first:last])


def test_threads_do_not_change_a_bit() -> None:
    x, weight = make(33, 500, 577)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = ops.row_linear(x, weight)
        torch.set_num_threads(2)
        assert torch.equal(ops.row_linear(x, weight), one)
    finally:
        torch.set_num_threads(threads)


def test_strided_input() -> None:
    x, weight = make(6, 10, 40)
    assert torch.equal(
        ops.row_linear(x[:, ::2], weight[:, ::2]), ops.row_linear(x[:, ::2].clone(), weight[:, ::2].clone())
    )
    assert torch.equal(ops.row_linear(x[::2], weight[1:]), ops.row_linear(x[::2].clone(), weight[1:].clone()))


def test_nan_stays_in_its_row() -> None:
    x, weight = make(5, 12, 30)
    x[2, 3] = torch.nan
    out = ops.row_linear(x, weight)
    assert out[2].isnan().all() and not out[[0, 1, 3, 4]].isnan().any()


@pytest.mark.parametrize(
    "x, weight, words",
    [
        (torch.ones(2, 3), torch.ones(4, 5), r"\[2, 3\] and weight \[4, 5\]"),
        (torch.ones(3), torch.ones(4, 3), r"must be \[M, K\]"),
        (torch.ones(2, 3, dtype=torch.bfloat16), torch.ones(4, 3), "takes Float"),
    ],
)
def test_bad_input_is_named(x: torch.Tensor, weight: torch.Tensor, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ops.row_linear(x, weight)


def test_opcheck() -> None:
    torch.library.opcheck(torch.ops.grpo_mc.row_linear.default, make(5, 7, 20))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 70), st.integers(0, 70), st.integers(0, 1700), st.integers(0, 2**31))
def test_random_shapes(rows: int, columns: int, depth: int, seed: int) -> None:
    x, weight = make(rows, columns, depth, seed)
    assert_close(
        ops.row_linear(x, weight), reference.row_linear(x.double(), weight.double()), 2e-6, (rows, columns, depth)
    )
