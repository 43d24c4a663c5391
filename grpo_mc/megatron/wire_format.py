"""How a part of a tensor looks on its way to another rank: the codes of its blocks, then their scales, as bytes.

A part of n entries has B = ceil(n / block) blocks, the last one filled up with zeros. Its message is

    codes     B * block * bits / 8 bytes    4 bits: two entries a byte, the first in the low half, each q + 8, where q
                                            is -7 to 7; 8 bits: q as int8, -127 to 127
    scales    B * 4 bytes                   float32 in the machine's byte order; NaN = the block was not finite

and nothing else: both sides know n and the format, so there is no header. With blocks of 128 an entry takes 4.25 or
8.25 bits, 7.5 or 3.9 times less than float32. A block stands for q * scale, transformed back where hadamard is set.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_mc.ops import Int4Error, dequantize_int4, dequantize_int8, quantize_int4, quantize_int8

_SCALE_BYTES = 4


@dataclass(frozen=True)
class WireFormat:
    """Codes of 4 or 8 bits with one float32 scale a block; a part of n entries has ceil(n / block) blocks."""

    bits: int = 4
    """4 or 8; see grpo_mc.ops.int4 and int8."""
    block: int = 128
    """Entries that share a scale: a multiple of 32 up to 4096."""
    hadamard: bool = False
    """Transform every 32 entries first: outliers then cost their neighbours less."""

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise ValueError(f"wire format: bits is {self.bits}; it must be 4 or 8")
        if not 32 <= self.block <= 4096 or self.block % 32:
            raise ValueError(f"wire format: block is {self.block}; it must be a multiple of 32 up to 4096")

    def num_blocks(self, numel: int) -> int:
        """Blocks of a part; the last one is filled up with zeros."""
        return -(-numel // self.block)

    def num_bytes(self, numel: int) -> int:
        """Size of a part's message."""
        return self.num_blocks(numel) * (self._code_bytes + _SCALE_BYTES)

    def encode(self, part: Tensor, error: Int4Error | None, message: Tensor) -> None:
        """Writes the message [num_bytes] uint8 of a part [n]; `error` is added to the part and replaced."""
        quantize = quantize_int4 if self.bits == 4 else quantize_int8
        codes, scale = quantize(part, block=self.block, hadamard=self.hadamard, error=error)
        message[: codes.numel()] = codes.view(-1).view(torch.uint8)
        message[codes.numel() :].view(torch.float32).copy_(scale)

    def split(self, message: Tensor) -> tuple[Tensor, Tensor]:
        """(codes [B, block * bits / 8], scale [B]) of a message, in its memory."""
        blocks = message.numel() // (self._code_bytes + _SCALE_BYTES)
        codes = message[: blocks * self._code_bytes].view(blocks, self._code_bytes)
        scale = message[blocks * self._code_bytes :].view(torch.float32)
        return codes if self.bits == 4 else codes.view(torch.int8), scale

    def add(self, codes: Tensor, scale: Tensor, total: Tensor) -> None:
        """Adds what the codes stand for to total, float32 or bfloat16."""
        dequantize = dequantize_int4 if self.bits == 4 else dequantize_int8
        dequantize(codes, scale, shape=total.shape, hadamard=self.hadamard, add_to=total)

    @property
    def _code_bytes(self) -> int:
        return self.block * self.bits // 8


INT4 = WireFormat(bits=4, hadamard=True)
"""Of gradients between nodes: 4.25 bits an entry."""
INT8 = WireFormat(bits=8)
"""Of gradients inside a node: 8.25 bits an entry."""
DIFFERENCES = WireFormat(bits=4)
"""Of weights minus the copy that everybody holds. Weights themselves do not bear 4 bits; differences do."""
