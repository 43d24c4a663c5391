"""4-bit codes with error feedback, one obvious step after the other; the steps are those of 8-bit codes too."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from grpo_mc.ops.int4 import Int4Error

LOWEST_SCALE = 2.0**-126


def hadamard_matrix(size: int = 32) -> Tensor:
    """The Walsh-Hadamard matrix of that size over sqrt(size), float64: symmetric, its own inverse."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / size**0.5


def _transform(blocks: Tensor) -> Tensor:
    parts = blocks.double().view(len(blocks), blocks.shape[1] // 32, 32)
    return (parts @ hadamard_matrix()).view(blocks.shape).float()


def philox_words(counter: np.ndarray, seed: int) -> list[np.ndarray]:
    """The four random words of each counter (uint64) under the seed: Philox-4x32-10."""
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    c0, c1, c2, c3 = counter & low, counter >> shift, np.zeros_like(counter), np.zeros_like(counter)
    k0, k1 = np.uint64(seed & 0xFFFFFFFF), np.uint64(seed >> 32 & 0xFFFFFFFF)
    for _ in range(10):
        product0, product1 = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c2 = (product1 >> shift) ^ c1 ^ k0, (product0 >> shift) ^ c3 ^ k1
        c1, c3 = product1 & low, product0 & low
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & low, (k1 + np.uint64(0xBB67AE85)) & low
    return [c0, c1, c2, c3]


def uniforms(seed: int, first: int, count: int) -> Tensor:
    """The random number in [0, 1) of each index: Philox of index / 4 under the seed, word index % 4."""
    index = np.arange(first, first + count, dtype=np.uint64)
    words = np.choose((index % np.uint64(4)).astype(np.int64), philox_words(index >> np.uint64(2), seed))
    return torch.from_numpy(((words >> np.uint64(8)).astype(np.float64) * 2.0**-24).astype(np.float32))


def quantize_blocks(
    x: Tensor, levels: int, block: int, rounding: str, hadamard: bool, error: Int4Error | None, seed: int, offset: int
) -> tuple[Tensor, Tensor]:
    """(q [B, block] float32, whole numbers from -levels to levels; scale [B]); the error state is replaced."""
    count = -(-x.numel() // block)
    whole = torch.zeros(count * block)
    whole[: x.numel()] = x.float().flatten()
    whole = whole.view(count, block)
    if error is not None:
        whole = whole + error.codes.float() * error.scale[:, None]
    values = _transform(whole) if hadamard else whole
    amax = values.abs().amax(1) if count else torch.zeros(0)
    scale = (amax / levels).clamp_min(LOWEST_SCALE)
    inverse = (1.0 / scale)[:, None]
    if rounding == "nearest":
        q = (values * inverse).round()
    else:
        q = (values * inverse + uniforms(seed, offset, count * block).view(count, block)).floor()
    good = amax.isfinite()
    q = torch.where(good[:, None], q.clamp(-levels, levels), torch.zeros(()))
    scale = torch.where(good, scale, torch.nan)
    if error is not None:
        seen = q * scale[:, None]
        rest = whole - (_transform(seen) if hadamard else seen)
        rest_scale = (rest.abs().amax(1) / 127.0).clamp_min(LOWEST_SCALE)
        codes = (rest * (1.0 / rest_scale)[:, None]).round().clamp(-127, 127).nan_to_num().to(torch.int8)
        error.codes.copy_(torch.where(good[:, None], codes, error.codes.view(count, block)))
        error.scale.copy_(torch.where(good, rest_scale, error.scale))
    return q, scale


def dequantize_blocks(
    q: Tensor, scale: Tensor, shape: tuple[int, ...] | torch.Size, hadamard: bool, dtype: torch.dtype,
    add_to: Tensor | None,
) -> Tensor:  # fmt: skip
    """The numbers again, in that shape."""
    values = q * scale[:, None]
    values = _transform(values) if hadamard else values
    flat = values.flatten()[: torch.Size(shape).numel()].view(shape)
    return flat.to(dtype) if add_to is None else add_to.add_(flat)


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
    """(codes [B, block / 2] uint8, scale [B] float32); see grpo_mc.ops.int4."""
    q, scale = quantize_blocks(x, 7, block, rounding, hadamard, error, seed, offset)
    nibbles = (q + 8).to(torch.uint8).view(len(q), block // 2, 2)
    return nibbles[..., 0] | (nibbles[..., 1] << 4), scale


def dequantize_int4(
    codes: Tensor,
    scale: Tensor,
    *,
    shape: tuple[int, ...] | torch.Size,
    hadamard: bool = False,
    dtype: torch.dtype = torch.float32,
    add_to: Tensor | None = None,
) -> Tensor:
    """The numbers again, in that shape."""
    q = torch.stack([codes & 15, codes >> 4], -1).view(len(codes), 2 * codes.shape[1]).float() - 8
    return dequantize_blocks(q, scale, shape, hadamard, dtype, add_to)
