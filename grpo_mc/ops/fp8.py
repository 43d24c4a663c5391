"""FP8 (e4m3) matrices with a scale per tile: quantising, dequantising, and the product of two of them.

Tiles are 1 x 128 (activations, gradients), 128 x 128 (weights) or 128 x 1 (what a weight gradient sums over). `scale`
multiplies to dequantise. The rules, the same on every device (csrc/common/fp8.h):

    amax  = largest |x| of the tile         scale = max(amax / 448, 2^-126), rounded up to a power of two on request
    q     = e4m3(x * (1 / scale))           to nearest even, saturated at 448

A tile of zeros has codes 0. A tile with a NaN or an infinity has scale NaN and NaN codes: what is computed from it is
NaN, and nothing else is touched. Axes need not be multiples of 128: the last tile is smaller.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_mc.ops.device import check_devices, check_written
from grpo_mc.ops.loader import load

load()

FP8_BLOCK = 128
"""Entries of a tile along a quantised axis."""


def quantize_fp8(x: Tensor, *, tile: tuple[int, int] = (1, 128), power_of_two: bool = False) -> tuple[Tensor, Tensor]:
    """Codes and scales of a matrix.

    Args:
        x: [M, K] float32, bfloat16 or float16; may be strided.
        tile: (1, 128), (128, 1) or (128, 128): entries that share a scale.
        power_of_two: scales are powers of two (MX hardware wants them; half a bit of precision less).

    Returns:
        (q [M, K] float8_e4m3fn, scale [ceil(M / tile rows), ceil(K / tile columns)] float32). No gradient.

    Raises:
        ValueError: shape, dtype or tile.
    """
    check_devices("quantize_fp8", x=x)
    codes, scale = torch.ops.grpo_mc.quantize_fp8(x.detach(), *tile, power_of_two)
    return codes, scale


def dequantize_fp8(
    q: Tensor, scale: Tensor, *, tile: tuple[int, int] = (1, 128), dtype: torch.dtype = torch.float32
) -> Tensor:
    """q * scale of its tile: what quantize_fp8 returned, as numbers again.

    Args:
        q: [M, K] float8_e4m3fn.
        scale: as from quantize_fp8 with the same tile.
        dtype: float32 or bfloat16.

    Returns:
        [M, K]. A NaN code gives NaN.

    Raises:
        ValueError: shapes, dtypes or tile.
    """
    check_devices("dequantize_fp8", q=q, scale=scale)
    return torch.ops.grpo_mc.dequantize_fp8(q, scale, *tile, dtype)


def fp8_gemm(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    accumulate_into: Tensor | None = None,
) -> Tensor:
    """a times b transposed, both dequantised: sums over 128 entries of K in float32, then scaled and added in float32.

    The forward pass of a linear layer has x as a and the weight as b; its input's gradient has the output's gradient as
    a and the transposed weight (codes and scales) as b; its weight's gradient has both operands transposed, quantised
    along the tokens (tile (128, 1)).

    Args:
        a: [M, K] float8_e4m3fn, rows may be strided.
        a_scale: [M, ceil(K / 128)] float32.
        b: [N, K] float8_e4m3fn.
        b_scale: [ceil(N / 128), ceil(K / 128)] (tiles of 128 x 128) or [N, ceil(K / 128)] (tiles of 1 x 128).
        out_dtype: float32 or bfloat16; that of accumulate_into when it is given.
        accumulate_into: [M, N]; the product is added to it, in place.

    Returns:
        [M, N]; accumulate_into itself when it is given. K = 0 gives zeros, or leaves accumulate_into as it is.

    Raises:
        ValueError: shapes, dtypes, tensors on two devices.
    """
    check_devices("fp8_gemm", a=a, a_scale=a_scale, b=b, b_scale=b_scale, accumulate_into=accumulate_into)
    if accumulate_into is not None:
        check_written("fp8_gemm", "accumulate_into", accumulate_into)
        torch.ops.grpo_mc.fp8_gemm_(accumulate_into, a, a_scale, b, b_scale, True)
        return accumulate_into
    rows, columns = (x.shape[0] if x.dim() == 2 else 0 for x in (a, b))  # the operator refuses other shapes
    out = torch.empty(rows, columns, dtype=out_dtype, device=a.device)
    torch.ops.grpo_mc.fp8_gemm_(out, a, a_scale, b, b_scale, False)
    return out


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
    """fp8_gemm for each expert: rows offsets[e] to offsets[e + 1] of a times b[e] transposed.

    Args:
        a: [M, K] float8_e4m3fn, rows in the order of the experts.
        a_scale: [M, ceil(K / 128)] float32.
        b: [E, N, K] float8_e4m3fn.
        b_scale: [E, ceil(N / 128), ceil(K / 128)] or [E, N, ceil(K / 128)] float32.
        offsets: [E + 1] int64, not falling; an expert may have no rows, and needs no multiple of anything.
        out_dtype, accumulate_into: as in fp8_gemm.

    Returns:
        [M, N]. Rows of no expert are 0 (left as they are in accumulate_into), whatever a holds there.

    Raises:
        ValueError: shapes, dtypes, offsets, tensors on two devices.
    """
    check_devices(
        "fp8_grouped_gemm", a=a, a_scale=a_scale, b=b, b_scale=b_scale, offsets=offsets, accumulate_into=accumulate_into
    )
    if accumulate_into is not None:
        check_written("fp8_grouped_gemm", "accumulate_into", accumulate_into)
        torch.ops.grpo_mc.fp8_grouped_gemm_(accumulate_into, a, a_scale, b, b_scale, offsets, True)
        return accumulate_into
    rows, columns = a.shape[0] if a.dim() == 2 else 0, b.shape[1] if b.dim() == 3 else 0
    out = torch.empty(rows, columns, dtype=out_dtype, device=a.device)
    torch.ops.grpo_mc.fp8_grouped_gemm_(out, a, a_scale, b, b_scale, offsets, False)
    return out


def _tiles(size: int, tile: int) -> int:
    return (size + tile - 1) // tile


@torch.library.register_fake("grpo_mc::quantize_fp8")
def _fake_quantize(x: Tensor, tile_rows: int, tile_columns: int, power_of_two: bool) -> tuple[Tensor, Tensor]:
    rows, columns = x.shape
    codes = x.new_empty(rows, columns, dtype=torch.float8_e4m3fn)
    return codes, x.new_empty(_tiles(rows, tile_rows), _tiles(columns, tile_columns), dtype=torch.float32)


@torch.library.register_fake("grpo_mc::dequantize_fp8")
def _fake_dequantize(codes: Tensor, scale: Tensor, tile_rows: int, tile_columns: int, dtype: torch.dtype) -> Tensor:
    return codes.new_empty(codes.shape, dtype=dtype)


@torch.library.register_fake("grpo_mc::fp8_gemm_")
def _fake_gemm(out: Tensor, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, accumulate: bool) -> None:
    return None


@torch.library.register_fake("grpo_mc::fp8_grouped_gemm_")
def _fake_grouped(
    out: Tensor, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, offsets: Tensor, accumulate: bool
) -> None:
    return None
