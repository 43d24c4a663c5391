"""An Adam step and its states in few bits, one obvious line after the other; the same bits as the operator.

The twin of csrc/common/adam.h, in torch: bits of a float32 are had by `view(torch.int32)`.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from grpo_mc.ops.adam import BLOCK, AdamState
from grpo_mc.ops.reference.int4 import philox_words

LOWEST_SCALE = 2.0**-126
RANGE = 2.0**-16
"""Lowest level of v over the highest, at least."""
LARGEST = 2.0**127
"""v must stay below."""
SIZES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
"""Magnitudes of m in 4 bits."""
LATTICE_M, LATTICE_SECOND = 40503, 21407


def adam_step(
    params: Tensor,
    grads: Tensor,
    state: AdamState,
    *,
    lr: float,
    step: int,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    grad_scale: float = 1.0,
    clip_coef: float = 1.0,
    out_bf16: Tensor | None = None,
    seed: int = 0,
    offset: int = 0,
) -> None:
    """One step, in place; see grpo_mc.ops.adam."""
    beta1, beta2 = betas
    m, v = adam_moments(state, params.shape)
    g = grads.detach().float() * (clip_coef / grad_scale)
    m = m + (1 - beta1) * (g - m)
    v = v * beta2 + (1 - beta2) * g * g
    # By way of float64 it is the nearest float32; torch's own root may be the next one.
    root = v.double().sqrt().float() * (1 / math.sqrt(1 - beta2**step))
    params.copy_(params * (1 - lr * weight_decay) - lr / (1 - beta1**step) * (m / (root + eps)))
    if out_bf16 is not None:
        out_bf16.copy_(params.view(out_bf16.shape))
    _store(state, m, v, seed, step, offset)


def adam_moments(state: AdamState, shape: tuple[int, ...] | torch.Size) -> tuple[Tensor, Tensor]:
    """The moments m and v of a state, float32 in that shape."""
    if state.exp_avg_scale is None or state.exp_avg_sq_scale is None:
        return state.exp_avg.clone(), state.exp_avg_sq.clone()
    bits = state.exp_avg.shape[1] * 8 // BLOCK
    v = _level(state.exp_avg_sq_scale, _unpack(state.exp_avg_sq, bits), bits)
    code = _unpack(state.exp_avg, bits)
    place, is_negative = code % 2 ** (bits - 1), code >= 2 ** (bits - 1)
    size = (place.float() if bits == 8 else SIZES[place]) * state.exp_avg_scale[:, None]
    m = torch.where(is_negative, -size, size) * _unit(v)
    count = torch.Size(shape).numel()
    return m.flatten()[:count].view(shape), v.flatten()[:count].view(shape)


def _store(state: AdamState, m: Tensor, v: Tensor, seed: int, step: int, offset: int) -> None:
    if state.exp_avg_scale is None or state.exp_avg_sq_scale is None:
        state.exp_avg.copy_(m)
        state.exp_avg_sq.copy_(v)
        return
    bits, blocks = state.exp_avg.shape[1] * 8 // BLOCK, len(state.exp_avg)
    m, v = (torch.nn.functional.pad(x.flatten(), (0, blocks * BLOCK - x.numel())).view(blocks, BLOCK) for x in (m, v))
    random_v, random_m = _random(seed, step, offset // BLOCK, blocks)
    is_good = m.isfinite().all(1) & (v < LARGEST).all(1)

    highest = v.amax(1) if blocks else torch.zeros(0)
    smallest = torch.where(v > 0, v, torch.inf).amin(1) if blocks else torch.zeros(0)
    lowest = torch.where(highest > 0, torch.maximum(smallest, highest * RANGE), 0.0)
    ends = torch.stack([lowest, highest], 1)
    gap = _gap(ends, bits)
    inverse = torch.where(gap > 0, 1.0 / gap.float(), 0.0)
    place = (_bits(v) - _bits(lowest)[:, None]).int().float() * inverse[:, None]
    code_v = place.clamp(0, 2**bits - 2).nan_to_num().long()
    below, above = _level(ends, code_v, bits), _level(ends, code_v + 1, bits)
    code_v += (random_v * (above - below) < v - below).long()

    x = m / _unit(_level(ends, code_v, bits))
    amax = x.abs().amax(1) if blocks else torch.zeros(0)
    is_good &= amax.isfinite()
    scale = (amax / (127 if bits == 8 else 6)).clamp_min(LOWEST_SCALE)
    x = x * (1.0 / scale)[:, None]
    size = x.abs()
    place = size if bits == 8 else torch.minimum(2 * size, torch.minimum(size + 2, 0.5 * size + 4))
    code_m = (place + random_m).clamp_max(2 ** (bits - 1) - 1).nan_to_num().long() + 2 ** (bits - 1) * x.signbit()

    for codes, kept in ((code_m, state.exp_avg), (code_v, state.exp_avg_sq)):
        kept.copy_(_pack(torch.where(is_good[:, None], codes, 0), bits))
    state.exp_avg_scale.copy_(torch.where(is_good, scale, torch.nan))
    state.exp_avg_sq_scale.copy_(torch.where(is_good[:, None], ends, torch.nan))


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32).long()


def _gap(ends: Tensor, bits: int) -> Tensor:
    """Between two levels of v, in the bits of a float32."""
    return (_bits(ends[:, 1]) - _bits(ends[:, 0]) + 2**bits - 2) // (2**bits - 1)


def _level(ends: Tensor, code: Tensor, bits: int) -> Tensor:
    return (_bits(ends[:, 0])[:, None] + code * _gap(ends, bits)[:, None]).int().view(torch.float32)


def _unit(v: Tensor) -> Tensor:
    """The power of two below the root of v, or half of it."""
    exponent = ((_bits(v) >> 23) + 127) // 2
    return (exponent << 23).int().view(torch.float32)


def _unpack(codes: Tensor, bits: int) -> Tensor:
    return codes.long() if bits == 8 else torch.cat([codes & 15, codes >> 4], 1).long()


def _pack(codes: Tensor, bits: int) -> Tensor:
    half = BLOCK // 2
    return (codes if bits == 8 else codes[:, :half] | (codes[:, half:] << 4)).to(torch.uint8)


def _random(seed: int, step: int, first_block: int, blocks: int) -> tuple[Tensor, Tensor]:
    """Numbers in (0, 1) for every entry's v and m [blocks, 128]: 16 bits of a Philox word, some times a constant."""
    block = np.arange(first_block, first_block + blocks, dtype=np.uint64)[:, None]
    counter = np.uint64((step << 36) % 2**64) + block * np.uint64(8) + np.arange(8, dtype=np.uint64)[None]
    words = np.concatenate(philox_words(counter, seed), 1).astype(np.int64)  # word w of lane l at 8 * w + l
    low, high = words & 0xFFFF, words >> 16
    bits = np.concatenate([low, low * LATTICE_SECOND, high, high * LATTICE_SECOND], 1) % 65536
    numbers = [torch.from_numpy((x + 0.5) / 65536).float() for x in (bits, bits * LATTICE_M % 65536)]
    return numbers[0], numbers[1]
