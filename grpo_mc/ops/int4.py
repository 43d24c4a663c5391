"""4-bit codes for gradients on the wire: a symmetric 15-level code with one scale a block, 8-bit error feedback.

    h = x + error         y = hadamard(h) or h        scale = max(max|y| / 7, 2^-126)        q = round(y / scale)

The rounding's rest, h minus what the receiver sees, is kept in 8 bits and added to the next x, so that over many steps
nothing is lost (error feedback; 8 bits lose nothing against float32 here). The transform, a 32-point Walsh-Hadamard
one, spreads outliers over a block. Two codes a byte, the first in the low half, each q + 8. A block with a NaN or an
infinity has scale NaN, and leaves its error as it was. Sources: SDP4Bit (arXiv 2410.15526) for levels and transform,
LoCo (arXiv 2407.04480) for 8-bit error feedback.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_mc.ops.device import check_devices, check_written
from grpo_mc.ops.loader import load

load()

ROUNDINGS = ("nearest", "stochastic")


class Int4Error(NamedTuple):
    """What earlier calls left over, in 8 bits: codes [B, block] int8 times scale [B] float32. quantize_int8's too."""

    codes: Tensor
    scale: Tensor


def int4_error(x: Tensor, *, block: int = 128) -> Int4Error:
    """The error state of a tensor like x before its first step: zeros."""
    blocks = -(-x.numel() // block)
    return Int4Error(
        torch.zeros(blocks, block, dtype=torch.int8, device=x.device), torch.zeros(blocks, device=x.device)
    )


def quantize_int4(
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
        x: n entries of any shape, float32, bfloat16 or float16. The last block is filled up with zeros.
        block: Entries that share a scale: a multiple of 32 up to 4096.
        rounding: "nearest" (even), or "stochastic": up with the probability of the fraction, by a random number that is
            a pure function of seed and offset + index, so it depends on no thread and no rank.
        hadamard: Transform every 32 entries first.
        error: Added to x, and replaced by what this call leaves over. None = no feedback.
        seed, offset: Of the random numbers; offset is the index of the first entry.

    Returns:
        (codes [B, block / 2] uint8, scale [B] float32). No gradient.

    Raises:
        ValueError: dtype, block, rounding, or an error state of another size.
    """
    return quantize_codes("int4", x, block, rounding, hadamard, error, seed, offset)


def dequantize_int4(
    codes: Tensor,
    scale: Tensor,
    *,
    shape: tuple[int, ...] | torch.Size,
    hadamard: bool = False,
    dtype: torch.dtype = torch.float32,
    add_to: Tensor | None = None,
) -> Tensor:
    """What quantize_int4 coded, as numbers again.

    Args:
        codes, scale: As returned; `hadamard` as given.
        shape: Of the result.
        dtype: float32 or bfloat16; that of add_to when it is given.
        add_to: A contiguous tensor of that shape: the numbers are added to it, in place.

    Returns:
        The tensor; add_to itself when it is given.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    return dequantize_codes("int4", codes, scale, shape, hadamard, dtype, add_to)


def quantize_codes(
    kind: str, x: Tensor, block: int, rounding: str, hadamard: bool, error: Int4Error | None, seed: int, offset: int
) -> tuple[Tensor, Tensor]:
    """quantize_int4 or, with kind "int8", quantize_int8."""
    op = f"quantize_{kind}"
    if rounding not in ROUNDINGS:
        raise ValueError(f"{op}: rounding is {rounding!r}; it must be one of {', '.join(ROUNDINGS)}")
    codes, scale = error if error is not None else (None, None)
    check_devices(op, x=x, error_codes=codes, error_scale=scale)
    compiled = getattr(torch.ops.grpo_mc, op)
    return compiled(x.detach(), codes, scale, block, rounding == "stochastic", hadamard, seed, offset)


def dequantize_codes(
    kind: str, codes: Tensor, scale: Tensor, shape: tuple[int, ...] | torch.Size, hadamard: bool, dtype: torch.dtype,
    add_to: Tensor | None,
) -> Tensor:  # fmt: skip
    """dequantize_int4 or, with kind "int8", dequantize_int8."""
    op = f"dequantize_{kind}"
    check_devices(op, codes=codes, scale=scale, add_to=add_to)
    entries_a_code = 2 if kind == "int4" else 1
    if codes.dim() != 2:
        columns = "block / 2" if kind == "int4" else "block"
        raise ValueError(f"{op}: codes have shape {list(codes.shape)}; they must be [B, {columns}]")
    if add_to is not None and add_to.shape != torch.Size(shape):
        raise ValueError(f"{op}: add_to has shape {list(add_to.shape)}; it must be {list(shape)}")
    if add_to is not None:
        check_written(op, "add_to", add_to)
    out = add_to if add_to is not None else torch.empty(shape, dtype=dtype, device=codes.device)
    block = entries_a_code * codes.shape[1]
    getattr(torch.ops.grpo_mc, f"{op}_")(out, codes, scale, block, hadamard, add_to is not None)
    return out


def _fake_quantize(code_dtype: torch.dtype, entries_a_code: int) -> Callable[..., tuple[Tensor, Tensor]]:
    def fake(
        x: Tensor, error_codes: Tensor | None, error_scale: Tensor | None, block: int, stochastic: bool, hadamard: bool,
        seed: int, offset: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        blocks = (x.numel() + block - 1) // block
        return x.new_empty(blocks, block // entries_a_code, dtype=code_dtype), x.new_empty(blocks, dtype=torch.float32)

    return fake


def _fake_dequantize(out: Tensor, codes: Tensor, scale: Tensor, block: int, hadamard: bool, add: bool) -> None:
    return None


torch.library.register_fake("grpo_mc::quantize_int4", _fake_quantize(torch.uint8, 2))
torch.library.register_fake("grpo_mc::quantize_int8", _fake_quantize(torch.int8, 1))
torch.library.register_fake("grpo_mc::dequantize_int4_", _fake_dequantize)
torch.library.register_fake("grpo_mc::dequantize_int8_", _fake_dequantize)
