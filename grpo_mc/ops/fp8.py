"""FP8 (e4m3) matrices with a scale per tile: quantising, dequantising, and the product of two of them.

Tiles are 1 x 128 (activations, gradients), 128 x 128 (weights) or 128 x 1 (what a weight gradient sums over). `scale`
multiplies to dequantise. The rules, the same on every device (csrc/common/fp8.h):

    amax  = largest |x| of the tile         scale = max(amax / 448, 2^-126), rounded up to a power of two on request
    q     = e4m3(x * (1 / scale))           to nearest even, saturated at 448

A tile of zeros has codes 0. A tile with a NaN or an infinity has scale NaN and NaN codes: what is computed from it is
NaN, and nothing else is touched. Axes need not be multiples of 128: the last tile is smaller.

Rows of several experts in one matrix go with `offsets`: tiles of 128 x 1 start again at each expert's first row, and
the tiles of expert e have rows offsets[e] // 128 + e and on of the scales (so the shape of the scales is known
beforehand, and some of their rows have no tile).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from grpo_mc.ops.device import check_devices, check_written
from grpo_mc.ops.loader import load

load()

FP8_BLOCK = 128
"""Entries of a tile along a quantised axis."""


def quantize_fp8(
    x: Tensor, *, tile: tuple[int, int] = (1, 128), power_of_two: bool = False, offsets: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Codes and scales of a matrix.

    Args:
        x: [M, K] float32, bfloat16 or float16; may be strided.
        tile: (1, 128), (128, 1) or (128, 128): entries that share a scale.
        power_of_two: scales are powers of two (MX hardware wants them; half a bit of precision less).
        offsets: [E + 1] int64, only with tile (128, 1): the rows of expert e are offsets[e] to offsets[e + 1].

    Returns:
        (q [M, K] float8_e4m3fn, scale [ceil(M / tile rows), ceil(K / tile columns)] float32). No gradient. With offsets
        scale is [M // 128 + E, K], and rows of no expert have codes 0, whatever x holds there.

    Raises:
        ValueError: shape, dtype, tile or offsets.
    """
    check_devices("quantize_fp8", x=x, offsets=offsets)
    codes, scale = torch.ops.grpo_mc.quantize_fp8(x.detach(), *tile, power_of_two, offsets)
    return codes, scale


def dequantize_fp8(
    q: Tensor, scale: Tensor, *, tile: tuple[int, int] = (1, 128), dtype: torch.dtype = torch.float32,
    offsets: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """q * scale of its tile: what quantize_fp8 returned, as numbers again.

    Args:
        q: [M, K] float8_e4m3fn.
        scale: as from quantize_fp8 with the same tile and offsets.
        dtype: float32 or bfloat16.
        offsets: as in quantize_fp8.

    Returns:
        [M, K]. A NaN code gives NaN; rows of no expert are 0.

    Raises:
        ValueError: shapes, dtypes, tile or offsets.
    """
    check_devices("dequantize_fp8", q=q, scale=scale, offsets=offsets)
    return torch.ops.grpo_mc.dequantize_fp8(q, scale, *tile, dtype, offsets)


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

    Hopper GPUs add up those 128 with some 14 bits (their FP8 tensor cores have no more): about 2e-4 of a sum where
    other devices have 1e-6.

    The forward pass of a linear layer has x as a and the weight as b; its input's gradient has the output's gradient as
    a and the transposed weight (codes and scales) as b; its weight's gradient has both operands transposed, quantised
    along the tokens (tile (128, 1)). Views will do: the kernels read either axis as it lies.

    Args:
        a: [M, K] float8_e4m3fn, may be strided.
        a_scale: [M, ceil(K / 128)] float32.
        b: [N, K] float8_e4m3fn, may be strided.
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
    """Weight gradients of experts: of rows offsets[e] to offsets[e + 1], grad transposed times x, both dequantised.

    Both operands come from quantize_fp8 with tile (128, 1) and these offsets, so no tile holds rows of two experts.

    Args:
        grad: [M, N] float8_e4m3fn, the gradient of the layer's output.
        grad_scale: [M // 128 + E, N] float32.
        x: [M, K] float8_e4m3fn, the layer's input.
        x_scale: [M // 128 + E, K] float32.
        offsets: [E + 1] int64, not falling; an expert may have no rows, and needs no multiple of anything.
        out_dtype: float32 or bfloat16; that of accumulate_into when it is given.
        accumulate_into: [E, N, K], or E tensors [N, K] that lie anywhere; the gradients are added to them, in place.

    Returns:
        [E, N, K]; accumulate_into itself when it is given. An expert without rows has zeros, or what accumulate_into
        holds as it is. Rows of no expert count nowhere, whatever they hold.

    Raises:
        ValueError: shapes, dtypes, offsets, tensors on two devices.
    """
    experts = max(0, offsets.numel() - 1)
    if accumulate_into is None:
        rows, columns = (each.shape[1] if each.dim() == 2 else 0 for each in (grad, x))
        result = torch.empty(experts, rows, columns, dtype=out_dtype, device=x.device)
        out: Sequence[Tensor] = result.unbind()
    else:
        if isinstance(accumulate_into, Tensor) and accumulate_into.dim() != 3:
            raise ValueError(
                f"fp8_grouped_wgrad: accumulate_into has shape {list(accumulate_into.shape)}; it must be [E, N, K]"
            )
        out = accumulate_into.unbind() if isinstance(accumulate_into, Tensor) else accumulate_into
        for each in [accumulate_into] if isinstance(accumulate_into, Tensor) else accumulate_into:
            check_written("fp8_grouped_wgrad", "accumulate_into", each)
    if len(out) != experts:
        raise ValueError(
            f"fp8_grouped_wgrad: accumulate_into has {len(out)} experts and offsets {experts}; they must be as many"
        )
    written = {f"accumulate_into[{e}]": each for e, each in enumerate(out)}
    check_devices(
        "fp8_grouped_wgrad", grad=grad, grad_scale=grad_scale, x=x, x_scale=x_scale, offsets=offsets, **written
    )
    accumulates = accumulate_into is not None
    if experts:  # the dispatcher takes no empty list of tensors to write
        torch.ops.grpo_mc.fp8_grouped_wgrad_(out, grad, grad_scale, x, x_scale, offsets, accumulates)
    return result if accumulate_into is None else accumulate_into


def _tiles(size: int, tile: int) -> int:
    return (size + tile - 1) // tile


@torch.library.register_fake("grpo_mc::quantize_fp8")
def _fake_quantize(
    x: Tensor, tile_rows: int, tile_columns: int, power_of_two: bool, offsets: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    rows, columns = x.shape
    codes = x.new_empty(rows, columns, dtype=torch.float8_e4m3fn)
    scale_rows = _tiles(rows, tile_rows) if offsets is None else rows // FP8_BLOCK + offsets.shape[0] - 1
    return codes, x.new_empty(scale_rows, _tiles(columns, tile_columns), dtype=torch.float32)


@torch.library.register_fake("grpo_mc::dequantize_fp8")
def _fake_dequantize(
    codes: Tensor, scale: Tensor, tile_rows: int, tile_columns: int, dtype: torch.dtype, offsets: Tensor | None = None
) -> Tensor:
    return codes.new_empty(codes.shape, dtype=dtype)


@torch.library.register_fake("grpo_mc::fp8_gemm_")
def _fake_gemm(out: Tensor, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, accumulate: bool) -> None:
    return None


@torch.library.register_fake("grpo_mc::fp8_grouped_gemm_")
def _fake_grouped(
    out: Tensor, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, offsets: Tensor, accumulate: bool
) -> None:
    return None


@torch.library.register_fake("grpo_mc::fp8_grouped_wgrad_")
def _fake_wgrad(
    out: Sequence[Tensor],
    grad: Tensor,
    grad_scale: Tensor,
    x: Tensor,
    x_scale: Tensor,
    offsets: Tensor,
    accumulate: bool,
) -> None:
    return None
