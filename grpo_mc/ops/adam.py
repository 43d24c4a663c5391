"""Adam with decoupled weight decay (AdamW, arXiv 1711.05101): everything a training step does to a tensor, in one pass.

    g = grad * clip_coef / grad_scale        m += (1 - beta1) * (g - m)        v = beta2 * v + (1 - beta2) * g * g
    param = param * (1 - lr * weight_decay) - lr / (1 - beta1^step) * m / (sqrt(v / (1 - beta2^step)) + eps)

and out_bf16 = param. The factors are computed in float64; then every operation is rounded to float32 on its own, so the
result is the same to the last bit for any number of threads, any instruction set and any device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from grpo_mc.ops.device import check_devices, check_written
from grpo_mc.ops.loader import load

load()


class AdamState(NamedTuple):
    """What Adam keeps of a tensor: the moments m and v, float32 in its shape."""

    exp_avg: Tensor
    exp_avg_sq: Tensor


def adam_state(params: Tensor) -> AdamState:
    """The state of a tensor before its first step: zeros."""
    return AdamState(*(torch.zeros(params.shape, device=params.device) for _ in range(2)))


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
) -> None:
    """One step, in place.

    Args:
        params: float32, contiguous, any shape; updated.
        grads: float32 or bfloat16 of that shape; read only. An entry that is NaN or infinite spoils the same entry of
            the parameters and the state, and no other.
        state: Updated.
        step: Which step this is, from 1; for the bias correction.
        grad_scale: What the loss was multiplied with: gradients are divided by it.
        clip_coef: What gradients are multiplied with to clip them: min(1, bound / norm).
        out_bf16: bfloat16, contiguous, as many entries: becomes a copy of the new parameters.

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
        params, grads.detach(), *state, out_bf16, lr, *betas, eps, weight_decay, step, grad_scale, clip_coef
    )


@torch.library.register_fake("grpo_mc::adam_step_")
def _fake_adam_step(
    params: Tensor, grads: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, out_bf16: Tensor | None, lr: float,
    beta1: float, beta2: float, eps: float, weight_decay: float, step: int, grad_scale: float, clip_coef: float,
) -> None:  # fmt: skip
    return None
