"""FP8 (e4m3) with a scale per tile, one obvious step after the other."""

from __future__ import annotations

import torch
from torch import Tensor

FP8_MAX = 448.0
LOWEST_SCALE = 2.0**-126


def _per_entry(scale: Tensor, tile: tuple[int, int], shape: torch.Size) -> Tensor:
    """A scale for every entry: each repeated over its tile."""
    rows, columns = shape
    return scale.repeat_interleave(tile[0], 0)[:rows].repeat_interleave(tile[1], 1)[:, :columns]


def quantize_fp8(x: Tensor, *, tile: tuple[int, int] = (1, 128), power_of_two: bool = False) -> tuple[Tensor, Tensor]:
    """Codes [M, K] float8_e4m3fn and one float32 scale for each tile; see grpo_mc.ops.fp8."""
    rows, columns = x.shape
    wide = x.float()
    height, width = -(-rows // tile[0]), -(-columns // tile[1])
    padded = torch.zeros(height * tile[0], width * tile[1], dtype=torch.float32)
    padded[:rows, :columns] = wide.abs()
    amax = padded.view(height, tile[0], width, tile[1]).amax((1, 3))  # NaN wins
    scale = (amax / FP8_MAX).clamp_min(LOWEST_SCALE)
    if power_of_two:
        mantissa, exponent = torch.frexp(scale)  # in [1/2, 1)
        scale = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int())
    scale = torch.where(amax.isfinite(), scale, torch.nan)
    scaled = wide * (1.0 / _per_entry(scale, tile, x.shape))
    return scaled.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scale


def dequantize_fp8(
    q: Tensor, scale: Tensor, *, tile: tuple[int, int] = (1, 128), dtype: torch.dtype = torch.float32
) -> Tensor:
    """q * scale of its tile, [M, K]."""
    return (q.float() * _per_entry(scale, tile, q.shape)).to(dtype)


def fp8_gemm(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    accumulate_into: Tensor | None = None,
) -> Tensor:
    """a times b transposed, dequantised and multiplied in float64; [M, N], or accumulate_into with it added."""
    b_tile = (1, 128) if b_scale.shape[0] == b.shape[0] else (128, 128)
    left = a.double() * _per_entry(a_scale, (1, 128), a.shape).double()
    right = b.double() * _per_entry(b_scale, b_tile, b.shape).double()
    product = left @ right.t()
    if accumulate_into is None:
        return product.to(out_dtype)
    return accumulate_into.copy_(accumulate_into.double() + product)


def fp8_grouped_gemm(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    offsets: Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    accumulate_into: Tensor | None = None,
) -> Tensor:
    """fp8_gemm of each expert's rows with its own b; rows of no expert are 0."""
    out = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float64)
    bounds = offsets.tolist()
    for expert, (first, last) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
        rows = slice(first, last)
        out[rows] = fp8_gemm(a[rows], a_scale[rows], b[expert], b_scale[expert], out_dtype=torch.float64)
    if accumulate_into is None:
        return out.to(out_dtype)
    return accumulate_into.copy_(accumulate_into.double() + out)
