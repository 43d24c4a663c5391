"""fp8_grouped_wgrad against a loop over the experts in torch: float32 operands, and the dequantising they need."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from grpo_mc import ops
from grpo_mc.ops import reference
from grpo_mc.ops.bench.fp8_grouped_gemm import COUNTS
from grpo_mc.ops.bench.timing import Case, on_one_thread, relative_error

OUTPUTS, INPUTS = 2048, 1024
TOKENS = (128, 1)


def cases(device: str = "cpu") -> Iterator[Case]:
    """Rows: added to a gradient buffer of each expert, against both loops and over threads."""
    draw = torch.Generator(device).manual_seed(0)
    rows, experts = sum(COUNTS), len(COUNTS)
    offsets = torch.tensor([0, *COUNTS], device=device).cumsum(0)

    def quantized(columns: int) -> tuple[Tensor, Tensor]:
        numbers = torch.randn(rows, columns, generator=draw, device=device)
        return ops.quantize_fp8(numbers, tile=TOKENS, offsets=offsets)

    (grad, grad_scale), (x, x_scale) = quantized(OUTPUTS), quantized(INPUTS)
    wide = [ops.dequantize_fp8(*each, tile=TOKENS, offsets=offsets) for each in ((grad, grad_scale), (x, x_scale))]
    exact = reference.fp8_grouped_wgrad(grad, grad_scale, x, x_scale, offsets, out_dtype=torch.float64)
    assert isinstance(exact, Tensor)

    def zeros() -> Tensor:
        return torch.zeros(experts, OUTPUTS, INPUTS, device=device)

    def ours(total: Tensor) -> Tensor:
        ops.fp8_grouped_wgrad(grad, grad_scale, x, x_scale, offsets, accumulate_into=total)
        return total

    def loop_over(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
        for each, a, b in zip(total, left.split(COUNTS), right.split(COUNTS), strict=True):
            each.addmm_(a.t(), b)
        return total

    def loop(total: Tensor) -> Tensor:
        return loop_over(total, *wide)

    def dequantised(total: Tensor) -> Tensor:
        left = ops.dequantize_fp8(grad, grad_scale, tile=TOKENS, offsets=offsets)
        return loop_over(total, left, ops.dequantize_fp8(x, x_scale, tile=TOKENS, offsets=offsets))

    def error(result: Tensor) -> float:
        return relative_error([result], [exact])

    others = (
        ("loop of torch float32 matmuls", loop),
        ("loop that dequantises first", dequantised),
        ("ours on 1 thread", on_one_thread(ours)),
    )
    for name, other in others:
        yield Case(
            op="fp8_grouped_wgrad",
            device=device,
            shape={"M": rows, "E": experts, "N": OUTPUTS, "K": INPUTS},
            dtype="float8_e4m3fn",
            baseline_name=name,
            ours=ours,
            baseline=other,
            error=error,
            prepare=zeros,
            flops=2.0 * rows * OUTPUTS * INPUTS,
        )
