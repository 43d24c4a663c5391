"""How a part of a tensor looks on its way to another rank: the codes of its blocks, then their scales, as bytes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_mc.ops import Int4Error, dequantize_int4, quantize_int4

SCALE_BYTES = 4


@dataclass(frozen=True)
class WireFormat:
    """4-bit codes with one float32 scale a block (see grpo_mc.ops.int4); a part of n entries has ceil(n / block)."""

    block: int = 128
    """Entries that share a scale: a multiple of 32."""
    hadamard: bool = True
    """Transform every 32 entries first: outliers cost their neighbours less."""

    def num_blocks(self, numel: int) -> int:
        """Blocks of a part; the last one is filled up with zeros."""
        return -(-numel // self.block)

    def num_bytes(self, numel: int) -> int:
        """Size of a part's message."""
        return self.num_blocks(numel) * (self.block // 2 + SCALE_BYTES)

    def encode(self, part: Tensor, error: Int4Error | None, message: Tensor) -> None:
        """Writes the message [num_bytes] uint8 of a part [n]; `error` is added to the part and replaced."""
        codes, scale = quantize_int4(part, block=self.block, hadamard=self.hadamard, error=error)
        message[: codes.numel()] = codes.view(-1)
        message[codes.numel() :].view(torch.float32).copy_(scale)

    def decode(self, message: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """(codes [B, block / 2], scale [B]) of a part of n entries, views of its message."""
        num_codes = self.num_blocks(numel) * (self.block // 2)
        return message[:num_codes].view(-1, self.block // 2), message[num_codes:].view(torch.float32)

    def add(self, codes: Tensor, scale: Tensor, total: Tensor) -> None:
        """Adds what the codes stand for to total, float32."""
        dequantize_int4(codes, scale, shape=total.shape, hadamard=self.hadamard, add_to=total)
