"""Megatron-Core's DDP and distributed optimizer around a policy model."""

from __future__ import annotations

import math

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig

from grpo_mc.config import OptimizerConfig
from grpo_mc.megatron.grad_accumulation import accumulate_into_buffers
from grpo_mc.megatron.model import PolicyModel


def wrap_ddp(model: PolicyModel) -> DistributedDataParallel:
    """Megatron-Core's DDP: gradients are summed in float32 (not averaged) and scattered over the data-parallel ranks.

    The loss is divided by global counts before the backward pass, so that the sum is the gradient of the batch.
    """
    settings = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    ddp = DistributedDataParallel(model.config, settings, model)
    accumulate_into_buffers(model)
    return ddp


def build_optimizer(ddp: DistributedDataParallel, config: OptimizerConfig) -> MegatronOptimizer:
    """Adam with decoupled weight decay, its state split over the data-parallel ranks. Norms and biases do not decay.

    On the CPU the update is torch's fused AdamW, one pass over parameters, gradients and states.
    """
    dtype = ddp.config.params_dtype
    optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            min_lr=config.min_lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.betas[0],
            adam_beta2=config.betas[1],
            adam_eps=config.eps,
            clip_grad=0.0,  # optimizer_step clips
            params_dtype=dtype,
            bf16=dtype == torch.bfloat16,
            use_distributed_optimizer=True,
        ),
        [ddp],
    )
    for group in optimizer.param_groups:
        # Megatron-Core leaves this to its scheduler of learning rate and weight decay, which does not run here.
        group["weight_decay"] = config.weight_decay * group.get("wd_mult", 1.0)
        if next(ddp.parameters()).device.type == "cpu":
            group["fused"] = True
    return optimizer


def optimizer_step(optimizer: MegatronOptimizer, *, lr: float, clip_grad: float) -> tuple[bool, float]:
    """One update with gradient clipping; none when the gradient holds NaN or inf.

    Gradients are clipped in place, of the parameters that this rank updates; Megatron-Core without CUDA extensions
    would make a scaled copy of every gradient, and its own step would measure the norm again.

    Args:
        lr: Learning rate of this step.
        clip_grad: Largest norm of the whole gradient; 0 = no clipping.

    Returns:
        Whether the weights changed, and the gradient's norm before clipping (the same on all ranks).
    """
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_mult", 1.0)
    if optimizer.prepare_grads():
        return False, math.nan
    norm = float(optimizer.get_grad_norm())
    if not math.isfinite(norm):
        return False, norm
    if 0.0 < clip_grad < norm:
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        torch._foreach_mul_(grads, clip_grad / (norm + 1e-6))
    return bool(optimizer.step_with_ready_grads()), norm
