"""Megatron-Core's DDP and distributed optimizer around a policy model."""

from __future__ import annotations

import math

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig

from grpo_mc.config import OptimizerConfig
from grpo_mc.megatron.checkpoint_shards import distributed_optimizers
from grpo_mc.megatron.fused_adam import STATE_BITS, FusedAdam, use_fused_adam
from grpo_mc.megatron.grad_accumulation import accumulate_into_buffers
from grpo_mc.megatron.model import PolicyModel
from grpo_mc.megatron.offload import ChunkedAdam


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

    The update is torch's AdamW, on the CPU its fused one, or FusedAdam (optimizer.kind).

    Raises:
        ValueError: states of few bits where two pipeline stages hold a copy of the embedding; offload on a CPU.
    """
    _check_replicas(ddp, config)
    if config.offload and next(ddp.parameters()).device.type == "cpu":
        raise ValueError(
            "optimizer: offload is true but the policy is on the CPU, whose memory holds the optimizer state already;"
            " set optimizer.offload: false"
        )
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
        if next(ddp.parameters()).device.type == "cpu" and config.kind == "adamw":
            group["fused"] = True
    if config.kind == "fused_adamw":
        for index, outer in enumerate(distributed_optimizers(optimizer)):
            # The same on all tensor-parallel ranks, which hold copies of norms and routers.
            seed = (index << 32) + int(outer.data_parallel_group.rank())
            chunked = ChunkedAdam(next(ddp.parameters()).device) if config.offload else None
            use_fused_adam(outer, bits=STATE_BITS[config.states], seed=seed, chunked=chunked)
    return optimizer


def _check_replicas(ddp: DistributedDataParallel, config: OptimizerConfig) -> None:
    """Copies of a parameter stay equal only where the same entries share a block of codes."""
    tied = ddp.module.architecture.tie_word_embeddings
    if config.states != "fp32" and tied and parallel_state.get_pipeline_model_parallel_world_size() > 1:
        raise ValueError(
            f"optimizer: states is '{config.states}', but the first and the last of several pipeline stages each hold"
            " the tied embedding and would round its states apart; set states: fp32 or parallel.pp: 1"
        )


def optimizer_step(optimizer: MegatronOptimizer, *, lr: float, clip_grad: float) -> tuple[bool, float]:
    """One update with gradient clipping; none when the gradient holds NaN or inf.

    Gradients are clipped in place, of the parameters that this rank updates, or while FusedAdam reads them;
    Megatron-Core without CUDA extensions would make a scaled copy of every gradient, and its own step would measure the
    norm again.

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
    _clip(optimizer, clip_grad / (norm + 1e-6) if 0.0 < clip_grad < norm else 1.0)
    return bool(optimizer.step_with_ready_grads()), norm


def _clip(optimizer: MegatronOptimizer, factor: float) -> None:
    for outer in distributed_optimizers(optimizer):
        if isinstance(outer.optimizer, FusedAdam):
            outer.optimizer.clip_coef = factor
        elif factor != 1.0 and outer.optimizer is not None:
            grads = [p.grad for group in outer.param_groups for p in group["params"] if p.grad is not None]
            torch._foreach_mul_(grads, factor)
