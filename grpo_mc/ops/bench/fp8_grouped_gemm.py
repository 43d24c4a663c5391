"""fp8_grouped_gemm against a loop over the experts in torch: float32 weights, and the dequantising they would need."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from grpo_mc import ops
from grpo_mc.ops import reference
from grpo_mc.ops.bench.timing import Case, on_one_thread, relative_error

COUNTS = (61, 0, 128, 7, 300, 129, 1, 90)
"""Rows of each expert: as uneven as a router makes them."""
COLUMNS, DEPTH = 2048, 1024


def cases(device: str = "cpu") -> Iterator[Case]:
    """Rows: against both loops, and over threads."""
    draw = torch.Generator(device).manual_seed(0)
    rows, experts = sum(COUNTS), len(COUNTS)
    a, a_scale = ops.quantize_fp8(torch.randn(rows, DEPTH, generator=draw, device=device))
    weights = [
        ops.quantize_fp8(torch.randn(COLUMNS, DEPTH, generator=draw, device=device), tile=(128, 128)) for _ in COUNTS
    ]
    b, b_scale = (torch.stack(list(parts)) for parts in zip(*weights, strict=True))
    offsets = torch.tensor([0, *COUNTS], device=device).cumsum(0)
    wide = [ops.dequantize_fp8(*weight, tile=(128, 128)) for weight in weights]
    x = ops.dequantize_fp8(a, a_scale)
    exact = reference.fp8_grouped_gemm(a, a_scale, b, b_scale, offsets, out_dtype=torch.float64)

    def ours(_: None) -> Tensor:
        return ops.fp8_grouped_gemm(a, a_scale, b, b_scale, offsets, out_dtype=torch.float32)

    def loop(_: None) -> Tensor:
        return torch.cat([part @ weight.t() for part, weight in zip(x.split(COUNTS), wide, strict=True)])

    def dequantised(_: None) -> Tensor:
        parts = (ops.dequantize_fp8(a, a_scale)).split(COUNTS)
        wide = [ops.dequantize_fp8(b[e], b_scale[e], tile=(128, 128)) for e in range(experts)]
        return torch.cat([part @ weight.t() for part, weight in zip(parts, wide, strict=True)])

    def error(result: Tensor) -> float:
        return relative_error([result], [exact])

    others = (
        ("loop of torch float32 matmuls", loop),
        ("loop that dequantises first", dequantised),
        ("ours on 1 thread", on_one_thread(ours)),
    )
    for name, other in others:
        yield Case(
            op="fp8_grouped_gemm",
            device=device,
            shape={"M": rows, "E": experts, "N": COLUMNS, "K": DEPTH},
            dtype="float8_e4m3fn",
            baseline_name=name,
            ours=ours,
            baseline=other,
            error=error,
            flops=2.0 * rows * COLUMNS * DEPTH,
        )
