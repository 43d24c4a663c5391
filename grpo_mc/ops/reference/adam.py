"""An Adam step, one obvious line after the other; the same bits as the operator."""

from __future__ import annotations

import math

from torch import Tensor

from grpo_mc.ops.adam import AdamState


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
    """One step, in place; see grpo_mc.ops.adam."""
    beta1, beta2 = betas
    m, v = state.exp_avg, state.exp_avg_sq
    g = grads.detach().float() * (clip_coef / grad_scale)
    m.copy_(m + (1 - beta1) * (g - m))
    v.copy_(v * beta2 + (1 - beta2) * g * g)
    # By way of float64 it is the nearest float32; torch's own root may be the next one.
    root = v.double().sqrt().float() * (1 / math.sqrt(1 - beta2**step))
    params.copy_(params * (1 - lr * weight_decay) - lr / (1 - beta1**step) * (m / (root + eps)))
    if out_bf16 is not None:
        out_bf16.copy_(params.view(out_bf16.shape))
