"""The helper that carries calls to a GPU (tests/gpu), with the CPU as the device: nothing is lost on the way."""

from __future__ import annotations

import torch

from grpo_mc import ops
from helpers import on_cuda


def test_what_an_operator_writes_and_returns_comes_back() -> None:
    x = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    error = ops.int4_error(x)
    codes, scale = ops.quantize_int4(x, error=error)
    operator = torch.ops.grpo_mc.quantize_int4.default
    again = ops.int4_error(x)
    run = on_cuda.carried(operator, operator._schema, "cpu")
    there = run(x, again.codes, again.scale, 128, False, False, 0, offset=0)
    assert torch.equal(there[0], codes) and torch.equal(there[1], scale)
    assert torch.equal(again.codes, error.codes) and torch.equal(again.scale, error.scale)
    out = torch.ones(3, 50)
    operator = torch.ops.grpo_mc.dequantize_int4_.default
    on_cuda.carried(operator, operator._schema, "cpu")(out, codes, scale, 128, False, True)
    assert torch.equal(out, ops.dequantize_int4(codes, scale, shape=(3, 50)) + 1)


def test_a_list_that_an_operator_writes_comes_back() -> None:
    draw, offsets = torch.Generator().manual_seed(0), torch.tensor([0, 3, 7])
    operands = [
        part
        for columns in (5, 4)
        for part in ops.quantize_fp8(torch.randn(7, columns, generator=draw), tile=(128, 1), offsets=offsets)
    ]
    out, operator = list(torch.ones(2, 5, 4).unbind()), torch.ops.grpo_mc.fp8_grouped_wgrad_.default
    assert on_cuda.carried(operator, operator._schema, "cpu")(out, *operands, offsets, True) is None
    want = ops.fp8_grouped_wgrad(*operands, offsets, accumulate_into=torch.ones(2, 5, 4))
    assert isinstance(want, torch.Tensor) and torch.equal(torch.stack(out), want)


def test_strides_travel_with_a_tensor() -> None:
    x = torch.arange(24.0).view(4, 6)
    for view in (x.t(), x[:, ::2], x[1:, 1:], x[:0]):
        carried = on_cuda.carry(view, "cpu")
        assert torch.equal(carried, view) and carried.stride() == view.stride()
        assert view.numel() == 0 or carried.data_ptr() != view.data_ptr()
    wide = x[:1].expand(5, 6)
    assert torch.equal(on_cuda.carry(wide, "cpu"), wide)
