"""A tiny policy on any mesh, and training steps that are the same on every layout. For rank processes of tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from grpo_mc.algorithms.denominators import count_denominators
from grpo_mc.algorithms.loss import LossInputs
from grpo_mc.config import AlgorithmConfig, OptimizerConfig
from grpo_mc.data.micro_batches import GroupPart
from grpo_mc.data.packing import PackedBatch, pack
from grpo_mc.data.records import FinishReason, Group, Prompt, Rollout, Segment
from grpo_mc.megatron.mesh import Mesh

NUM_GROUPS, GROUP_SIZE, RESPONSE_LENGTH = 4, 2, 5
LR = 1e-2


def build_policy(
    mesh: Mesh,
    model_folder: Path,
    dtype: str = "fp32",
    compression: str = "none",
    optimizer: dict[str, Any] | None = None,
) -> Any:
    """A Policy with the weights of a model folder; `optimizer` holds more of its options."""
    from grpo_mc.megatron.hf_checkpoint import open_checkpoint
    from grpo_mc.megatron.model import build_model, policy_config
    from grpo_mc.megatron.train_step import Policy
    from grpo_mc.megatron.weights import load_weights

    weights = open_checkpoint(model_folder)
    model = build_model(weights.architecture, mesh, policy_config(weights.architecture, mesh, dtype=dtype))
    load_weights(model, weights, mesh)
    settings = OptimizerConfig(lr=LR, weight_decay=0.1, **(optimizer or {}))
    return Policy(
        model, mesh, algorithm=AlgorithmConfig(), optimizer=settings, temperature=1.0, compression=compression
    )


def train_step(policy: Any, mesh: Mesh, step: int, lr: float | None = None) -> tuple[float, float]:
    """One forward, backward and update on the batch of a step; a group is a micro-batch. lr None = falling from LR.

    Returns: the loss over all ranks and the gradient's norm.
    """
    from grpo_mc.megatron.micro_batch import make_micro_batch

    groups = [_group(step, position, policy.model.architecture.vocab_size) for position in range(NUM_GROUPS)]
    pad = mesh.tp if policy.model.config.sequence_parallel else 1
    batches = []
    for position in range(mesh.dp_rank, NUM_GROUPS, mesh.dp):
        packed = pack(groups, (GroupPart(position, tuple(range(GROUP_SIZE))),), pad_multiple=pad)
        batches.append(make_micro_batch(packed, mesh.device, _loss_inputs(packed)))
    rows = NUM_GROUPS * GROUP_SIZE
    denominators = count_denominators(
        torch.ones(rows * RESPONSE_LENGTH, dtype=torch.bool),
        torch.arange(rows + 1) * RESPONSE_LENGTH,
        torch.arange(rows) // GROUP_SIZE,
    )
    loss = policy.backward(batches, denominators)["loss"]
    updated, norm = policy.step(LR / (step + 1) if lr is None else lr)
    assert updated
    return loss, norm


def hf_weights(policy: Any, mesh: Mesh) -> dict[str, torch.Tensor]:
    """The whole model as Hugging Face tensors, on rank 0."""
    from grpo_mc.megatron.weights import export_weights

    return {name: tensor.clone() for name, tensor in export_weights(policy.model, mesh)}


def adam_states(policy: Any) -> list[torch.Tensor]:
    """This rank's main weights, moments and step counts, in a fixed order."""
    from grpo_mc.megatron.checkpoint_shards import distributed_optimizers

    found: list[torch.Tensor] = []
    for outer in distributed_optimizers(policy.optimizer):
        for group in outer.optimizer.param_groups:
            for parameter in group["params"]:
                state = outer.optimizer.state[parameter]
                found += [
                    parameter.detach().clone(),
                    *(state[key].clone() for key in ("exp_avg", "exp_avg_sq", "step")),
                ]
    return found


def _group(step: int, position: int, vocab_size: int) -> Group:
    draw = np.random.default_rng(1000 * step + position)
    prompt = Prompt(f"tiny:{position}", draw.integers(0, vocab_size, 3 + position), "")
    rollouts = [
        Rollout(position, sample, prompt, [Segment("model", draw.integers(0, vocab_size, RESPONSE_LENGTH))], "",
                FinishReason.FINISHED, (0,))
        for sample in range(GROUP_SIZE)
    ]  # fmt: skip
    return Group(position, prompt, rollouts)


def _loss_inputs(packed: PackedBatch) -> LossInputs:
    num_rows, num_tokens = len(packed.rollout_order), packed.num_scored
    advantages = [1.0 if sample == 0 else -0.5 for _, sample in packed.rollout_order]
    return LossInputs(
        old_logprobs=torch.linspace(-6.0, -4.0, num_tokens),
        rollout_logprobs=torch.zeros(num_tokens),
        advantages=torch.tensor(advantages).repeat_interleave(RESPONSE_LENGTH),
        loss_mask=torch.ones(num_tokens, dtype=torch.bool),
        cu_seqlens=torch.arange(num_rows + 1) * RESPONSE_LENGTH,
        sequence_groups=torch.from_numpy(packed.group_positions),
    )
