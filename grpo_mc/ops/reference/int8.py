"""8-bit codes with error feedback: the steps of 4-bit codes with 127 levels on each side."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_mc.ops.int4 import Int4Error
from grpo_mc.ops.reference.int4 import dequantize_blocks, quantize_blocks


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
    """(codes [B, block] int8, scale [B] float32); see grpo_mc.ops.int8."""
    q, scale = quantize_blocks(x, 127, block, rounding, hadamard, error, seed, offset)
    return q.to(torch.int8), scale


def dequantize_int8(
    codes: Tensor,
    scale: Tensor,
    *,
    shape: tuple[int, ...] | torch.Size,
    hadamard: bool = False,
    dtype: torch.dtype = torch.float32,
    add_to: Tensor | None = None,
) -> Tensor:
    """The numbers again, in that shape."""
    return dequantize_blocks(codes.float(), scale, shape, hadamard, dtype, add_to)
