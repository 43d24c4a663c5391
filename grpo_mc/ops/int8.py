"""8-bit codes for gradients on the wire: as grpo_mc.ops.int4, with 255 symmetric levels and one code a byte.

    scale = max(max|y| / 127, 2^-126)        q = round(y / scale), int8

Between the processes of one node the link is fast enough for them, and what they round away is 1/300 of 4 bits' share.
Error feedback is the same 8-bit state as there (int4_error).
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_mc.ops.int4 import Int4Error, dequantize_codes, quantize_codes


def quantize_int8(
    x: Tensor,
    *,
    block: int = 128,
    rounding: str = "nearest",
    hadamard: bool = False,
    error: Int4Error | None = None,
    seed: int = 0,
    offset: int = 0,
) -> tuple[Tensor, Tensor]:
    """Codes and scales of a tensor, B = ceil(n / block) blocks of it in memory order.

    Args:
        x, block, rounding, hadamard, error, seed, offset: As of quantize_int4.

    Returns:
        (codes [B, block] int8, scale [B] float32). A block with a NaN or an infinity has scale NaN. No gradient.

    Raises:
        ValueError: dtype, block, rounding, or an error state of another size.
    """
    return quantize_codes("int8", x, block, rounding, hadamard, error, seed, offset)


def dequantize_int8(
    codes: Tensor,
    scale: Tensor,
    *,
    shape: tuple[int, ...] | torch.Size,
    hadamard: bool = False,
    dtype: torch.dtype = torch.float32,
    add_to: Tensor | None = None,
) -> Tensor:
    """What quantize_int8 coded, as numbers again; arguments, result and errors as of dequantize_int4."""
    return dequantize_codes("int8", codes, scale, shape, hadamard, dtype, add_to)
