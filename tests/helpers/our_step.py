"""Our training step on a helpers.trl_reference.FixedBatch, up to the gradients, to run in real ranks.

`run_distributed(our_steps, dp, folder, wanted, init=False)` gives each rank's results; gradients are on rank 0. A step
goes the way of training: advantages, micro-batch plan, shared-prefix packing, Megatron-Core's schedule and DDP, under
the configuration of benchmarks/vs_trl.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from grpo_mc.algorithms.advantages import compute_advantages
from grpo_mc.algorithms.denominators import count_batch
from grpo_mc.algorithms.loss import LossInputs
from grpo_mc.config import Config, load_config, resolve
from grpo_mc.data.micro_batches import measure, plan_micro_batches
from grpo_mc.data.packing import PackedBatch, pack
from grpo_mc.data.records import FinishReason, Group, Prompt, Rollout, Segment
from helpers.trl_reference import FixedBatch

if TYPE_CHECKING:
    from grpo_mc.megatron.mesh import Mesh

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class OurStep:
    """What our engine makes of a batch."""

    loss: float
    """Summed over micro-batches and ranks."""
    advantages: torch.Tensor
    """[N] float32, in the batch's order."""
    logprobs: list[torch.Tensor]
    """[N] float32, ragged, current policy; only this rank's rollouts, others empty."""
    gradients: dict[str, torch.Tensor]
    """By Hugging Face name; empty on ranks other than 0."""


def our_config(overrides: list[str]) -> Config:
    """configs/bench/vs_trl.yaml with overrides, resolved."""
    return resolve(load_config(REPOSITORY / "configs/bench/vs_trl.yaml", overrides), 1)


def groups_of(batch: FixedBatch) -> list[Group]:
    """The batch as scored groups."""
    groups = []
    for start in range(0, len(batch.prompts), batch.group_size):
        number = start // batch.group_size
        prompt = Prompt(f"fixed:{number}", np.array(batch.prompts[start], np.int64), "")
        rollouts = []
        for sample in range(batch.group_size):
            ids = np.array(batch.responses[start + sample], np.int64)
            segments = [Segment("model", ids, np.zeros(len(ids), np.float32))]
            rollout = Rollout(number, sample, prompt, segments, "", FinishReason.FINISHED, (0,))
            rollout.reward = batch.rewards[start + sample]
            rollouts.append(rollout)
        groups.append(Group(number, prompt, rollouts))
    return groups


@dataclass(frozen=True)
class Wanted:
    """One step to compute."""

    batch: FixedBatch
    overrides: list[str]
    """Of configs/bench/vs_trl.yaml."""
    max_tokens: int
    """Fed tokens of a micro-batch at most."""


def our_steps(model_folder: Path, wanted: list[Wanted]) -> list[OurStep]:
    """Forward and backward of each batch, each from the model in `model_folder`; nothing is updated."""
    from grpo_mc.megatron.mesh import build_mesh

    mesh = build_mesh()
    return [_step(model_folder, each, mesh) for each in wanted]


def _step(model_folder: Path, wanted: Wanted, mesh: Mesh) -> OurStep:
    from grpo_mc.megatron.gradients import export_gradients, gather_shards
    from grpo_mc.megatron.hf_checkpoint import open_checkpoint
    from grpo_mc.megatron.micro_batch import make_micro_batch
    from grpo_mc.megatron.model import build_model, policy_config
    from grpo_mc.megatron.train_step import Policy
    from grpo_mc.megatron.weights import load_weights

    batch, config = wanted.batch, our_config(wanted.overrides)
    checkpoint = open_checkpoint(model_folder)
    model = build_model(checkpoint.architecture, mesh, policy_config(checkpoint.architecture, mesh))
    load_weights(model, checkpoint, mesh)
    temperature = config.rollout.temperature
    policy = Policy(model, mesh, algorithm=config.algorithm, optimizer=config.optimizer, temperature=temperature)

    groups = groups_of(batch)
    result = compute_advantages(groups, config.algorithm)
    plans = plan_micro_batches([measure(group) for group in groups], wanted.max_tokens, mesh.dp)
    packed = [[pack(groups, entry) for entry in plan] for plan in plans]
    inputs = [[loss_inputs(p, batch, result.advantages, result.in_loss) for p in plan] for plan in packed]
    denominators = count_batch((i.loss_mask, i.cu_seqlens, i.sequence_groups) for plan in inputs for i in plan)
    mine = zip(packed[mesh.dp_rank], inputs[mesh.dp_rank], strict=True)
    micro_batches = [make_micro_batch(p, mesh.device, i) for p, i in mine]

    logprobs = [torch.zeros(0)] * len(batch.prompts)
    for micro_batch, scored in zip(micro_batches, policy.logprobs(micro_batches), strict=True):
        rows = zip(micro_batch.packed.rollout_order, micro_batch.packed.per_rollout(scored), strict=True)
        for (group, sample), row in rows:
            logprobs[group * batch.group_size + sample] = torch.from_numpy(np.array(row))
    sums = policy.backward(micro_batches, denominators)
    gather_shards(policy.ddp)
    gradients = {name: tensor.clone() for name, tensor in export_gradients(model, mesh)}
    return OurStep(sums["loss"], result.advantages, logprobs, gradients)


def loss_inputs(packed: PackedBatch, batch: FixedBatch, advantages: torch.Tensor, in_loss: torch.Tensor) -> LossInputs:
    """The constants of one micro-batch, in its order."""
    rows = [group * batch.group_size + sample for group, sample in packed.rollout_order]
    mask = packed.response_mask & packed.per_token(in_loss.numpy()[rows]).astype(bool)

    def packed_rows(ragged: list[list[float]] | None) -> torch.Tensor | None:
        return None if ragged is None else torch.tensor([value for row in rows for value in ragged[row]])

    return LossInputs(
        old_logprobs=packed_rows(batch.old_logprobs),
        rollout_logprobs=torch.zeros(packed.num_scored),
        advantages=torch.from_numpy(packed.per_token(advantages.numpy()[rows]).astype(np.float32)),
        loss_mask=torch.from_numpy(mask),
        cu_seqlens=torch.from_numpy(packed.cu_seqlens),
        sequence_groups=torch.from_numpy(packed.group_positions),
        ref_logprobs=packed_rows(batch.ref_logprobs),
    )
