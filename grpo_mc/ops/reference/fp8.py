"""FP8 (e4m3) with a scale per tile, one obvious step after the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

FP8_MAX = 448.0
LOWEST_SCALE = 2.0**-126


def _per_entry(scale: Tensor, tile: tuple[int, int], shape: torch.Size) -> Tensor:
    """A scale for every entry: each repeated over its tile."""
    rows, columns = shape
    return scale.repeat_interleave(tile[0], 0)[:rows].repeat_interleave(tile[1], 1)[:, :columns]


def _experts(offsets: Tensor) -> list[tuple[slice, slice]]:
    """Of each expert: its rows, and the rows of the scales that its tiles of 128 x 1 have."""
    bounds = offsets.tolist()
    found = []
    for expert, (first, last) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
        tile = first // 128 + expert
        found.append((slice(first, last), slice(tile, tile + -(-(last - first) // 128))))
    return found


def quantize_fp8(
    x: Tensor, *, tile: tuple[int, int] = (1, 128), power_of_two: bool = False, offsets: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Codes [M, K] float8_e4m3fn and one float32 scale for each tile; see grpo_mc.ops.fp8."""
    if offsets is not None:
        codes = torch.zeros(x.shape, dtype=torch.float8_e4m3fn)
        scale = torch.full((x.shape[0] // 128 + len(offsets) - 1, x.shape[1]), LOWEST_SCALE)
        for mine, tiles in _experts(offsets):
            codes[mine], scale[tiles] = quantize_fp8(x[mine], tile=tile, power_of_two=power_of_two)
        return codes, scale
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
    q: Tensor, scale: Tensor, *, tile: tuple[int, int] = (1, 128), dtype: torch.dtype = torch.float32,
    offsets: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """q * scale of its tile, [M, K]."""
    if offsets is not None:
        out = torch.zeros(q.shape, dtype=dtype)
        for rows, tiles in _experts(offsets):
            out[rows] = dequantize_fp8(q[rows], scale[tiles], tile=tile, dtype=dtype)
        return out
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
    for expert, (rows, _) in enumerate(_experts(offsets)):
        out[rows] = fp8_gemm(a[rows], a_scale[rows], b[expert], b_scale[expert], out_dtype=torch.float64)
    if accumulate_into is None:
        return out.to(out_dtype)
    return accumulate_into.copy_(accumulate_into.double() + out)


def fp8_grouped_wgrad(
    grad: Tensor,
    grad_scale: Tensor,
    x: Tensor,
    x_scale: Tensor,
    offsets: Tensor,
    *,
    out_dtype: torch.dtype = torch.float32,
    accumulate_into: Tensor | Sequence[Tensor] | None = None,
) -> Tensor | Sequence[Tensor]:
    """Of each expert's rows grad transposed times x, [E, N, K], or accumulate_into with it added."""
    out = torch.zeros(len(offsets) - 1, grad.shape[1], x.shape[1], dtype=torch.float64)
    for expert, (rows, tiles) in enumerate(_experts(offsets)):
        out[expert] = fp8_gemm(
            grad[rows].t(), grad_scale[tiles].t(), x[rows].t(), x_scale[tiles].t(), out_dtype=out.dtype
        )
    if accumulate_into is None:
        return out.to(out_dtype)
    for total, product in zip(accumulate_into, out, strict=True):
        total.copy_(total.double() + product)
    return accumulate_into
