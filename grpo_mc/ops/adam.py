"""Adam with decoupled weight decay (AdamW, arXiv 1711.05101): everything a training step does to a tensor, in one pass.

    g = grad * clip_coef / grad_scale        m += (1 - beta1) * (g - m)        v = beta2 * v + (1 - beta2) * g * g
    param = param * (1 - lr * weight_decay) - lr / (1 - beta1^step) * m / (sqrt(v / (1 - beta2^step)) + eps)

and out_bf16 = param. The factors are computed in float64; then every operation is rounded to float32 on its own, so the
result is the same to the last bit for any number of threads, any instruction set and any device.

The moments can be kept in 8 or 4 bits (8-bit: arXiv 2110.02861; 4-bit: arXiv 2309.01507), here in blocks of 128 entries
and rounded at random without bias. v has almost geometric levels from the block's smallest to its largest, none of
them 0: a v that decodes to 0 would blow its entry's update up. m is kept in units of the root of v. csrc/common/adam.h
says how, entry by entry.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from grpo_mc.ops.device import check_devices, check_written
from grpo_mc.ops.loader import load

load()

BLOCK = 128
"""Entries of a block of codes."""

STATE_BITS = (32, 8, 4)


class AdamState(NamedTuple):
    """What Adam keeps of n entries: the moments m and v.

    In 32 bits both are float32 in the shape of the parameters. In 8 or 4 bits they are uint8 [B, 16 * bits] with
    B = ceil(n / 128); in 4 bits byte j of a block holds entry j in its low half and entry j + 64 in its high half.
    """

    exp_avg: Tensor
    exp_avg_sq: Tensor
    exp_avg_scale: Tensor | None = None
    """[B] float32, of codes."""
    exp_avg_sq_scale: Tensor | None = None
    """[B, 2] float32, of codes: the lowest and the highest level of v."""


def adam_state(params: Tensor, *, bits: int = 32) -> AdamState:
    """The state of a tensor before its first step: zeros.

    Args:
        bits: Of a moment: 32 (8 bytes a parameter), 8 (2.09) or 4 (1.09).

    Raises:
        ValueError: other bits.
    """
    if bits not in STATE_BITS:
        raise ValueError(f"adam_state: bits is {bits}; it must be one of 32, 8 and 4")

    def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=params.device)

    if bits == 32:
        return AdamState(zeros(*params.shape), zeros(*params.shape))
    blocks, width = -(-params.numel() // BLOCK), BLOCK * bits // 8
    codes = [zeros(blocks, width, dtype=torch.uint8) for _ in range(2)]
    return AdamState(codes[0], codes[1], zeros(blocks), zeros(blocks, 2))


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
    """One step, in place.

    Args:
        params: float32, contiguous, any shape; updated.
        grads: float32 or bfloat16 of that shape; read only. An entry that is NaN or infinite spoils the same entry of
            the parameters and of a float32 state, and no other; of a state of codes it spoils the moments of its
            block, for good: they are NaN afterwards.
        state: From adam_state; updated.
        step: Which step this is, from 1; for the bias correction and for random rounding.
        grad_scale: What the loss was multiplied with: gradients are divided by it.
        clip_coef: What gradients are multiplied with to clip them: min(1, bound / norm).
        out_bf16: bfloat16, contiguous, as many entries: becomes a copy of the new parameters.
        seed, offset: Of the random rounding of codes. The random number of entry i is a pure function of seed, step and
            offset + i, so it depends on no thread; tensors that are stepped together have different offsets, multiples
            of 128.

    Raises:
        ValueError: shape, dtype, strides, tensors that share memory, a parameter that autograd follows, or a number
            that means nothing.
    """
    check_devices("adam_step", params=params, grads=grads, **state._asdict(), out_bf16=out_bf16)
    written = {"params": params, **state._asdict(), "out_bf16": out_bf16}
    for name, tensor in written.items():
        if tensor is not None:
            check_written("adam_step", name, tensor)
    torch.ops.grpo_mc.adam_step_(
        params, grads.detach(), *state, out_bf16, lr, *betas, eps, weight_decay, step, grad_scale, clip_coef, seed,
        offset,
    )  # fmt: skip


@torch.library.register_fake("grpo_mc::adam_step_")
def _fake_adam_step(
    params: Tensor, grads: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, exp_avg_scale: Tensor | None,
    exp_avg_sq_scale: Tensor | None, out_bf16: Tensor | None, lr: float, beta1: float, beta2: float, eps: float,
    weight_decay: float, step: int, grad_scale: float, clip_coef: float, seed: int, offset: int,
) -> None:  # fmt: skip
    return None
