"""fp8_gemm against torch's float32 product, alone (its operands already float32) and with the dequantising it needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from grpo_mc import ops
from grpo_mc.ops import reference
from grpo_mc.ops.bench.timing import Case, on_one_thread, relative_error

SHAPES = ((512, 4096, 4096), (4, 7168, 7168), (64, 4096, 4096))
WEIGHT_TILE = (128, 128)


def cases(device: str = "cpu") -> Iterator[Case]:
    """Rows: a training batch, a few decoded rows, and something between, against both and over threads."""
    generator = torch.Generator(device).manual_seed(0)
    for m, n, k in SHAPES:
        a, a_scale = ops.quantize_fp8(torch.randn(m, k, generator=generator, device=device))
        b, b_scale = ops.quantize_fp8(torch.randn(n, k, generator=generator, device=device), tile=WEIGHT_TILE)
        wide = ops.dequantize_fp8(a, a_scale), ops.dequantize_fp8(b, b_scale, tile=WEIGHT_TILE)
        exact = reference.fp8_gemm(a, a_scale, b, b_scale, out_dtype=torch.float64)
        operands = (a, a_scale, b, b_scale)

        def ours(_: None, operands: tuple[Tensor, ...] = operands) -> Tensor:
            return ops.fp8_gemm(*operands, out_dtype=torch.float32)

        def matmul(_: None, wide: tuple[Tensor, Tensor] = wide) -> Tensor:
            return wide[0] @ wide[1].t()

        def dequantised(_: None, operands: tuple[Tensor, ...] = operands) -> Tensor:
            a, a_scale, b, b_scale = operands
            rows, columns = b.shape
            left = a.float() * a_scale.repeat_interleave(128, 1)
            tiles = b.float().view(rows // 128, 128, columns // 128, 128)
            right = (tiles * b_scale[:, None, :, None]).view(rows, columns)
            return left @ right.t()

        def error(result: Tensor, exact: Tensor = exact) -> float:
            return relative_error([result], [exact])

        others: tuple[tuple[str, Callable[[None], Tensor]], ...] = (
            ("torch float32 matmul alone", matmul),
            ("torch dequantise and matmul", dequantised),
            ("ours on 1 thread", on_one_thread(ours)),
        )
        for name, other in others:
            yield Case(
                op="fp8_gemm",
                device=device,
                shape={"M": m, "N": n, "K": k},
                dtype="float8_e4m3fn",
                baseline_name=name,
                ours=ours,
                baseline=other,
                error=error,
                flops=2.0 * m * n * k,
            )
