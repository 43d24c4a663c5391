"""From scored groups to the micro-batches of one optimizer step: what is trained on, with which constants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from grpo_mc.algorithms.advantages import AdvantageResult
from grpo_mc.algorithms.denominators import Denominators
from grpo_mc.algorithms.loss import LossInputs
from grpo_mc.config import AlgorithmConfig
from grpo_mc.data.packing import GroupLengths, PackedBatch, measure, pack, plan_micro_batches
from grpo_mc.data.records import Group
from grpo_mc.megatron.mesh import Mesh
from grpo_mc.megatron.micro_batch import MicroBatch, make_micro_batch
from grpo_mc.pipeline.inference_module import RolloutLogprobs


@dataclass(frozen=True)
class StepGroups:
    """The groups of one optimizer step and what is known of them, the same on every rank."""

    groups: list[Group]
    advantages: AdvantageResult
    """Of exactly these groups, in this order."""
    old_logprobs: RolloutLogprobs | None
    """None = the current policy itself (one optimizer step per batch)."""


def carries_gradient(algorithm: AlgorithmConfig) -> bool:
    """Whether a token with advantage 0 can still have a gradient or change a denominator."""
    kl = algorithm.beta > 0 and algorithm.kl_placement == "in_loss"
    return kl or algorithm.entropy_coef > 0 or algorithm.correction.startswith("mask")


def trained_samples(step: StepGroups, algorithm: AlgorithmConfig) -> list[list[int]]:
    """Positions of the rollouts to run through the model, per group.

    Rollouts outside the loss are left out, and so are those whose gradient is exactly zero (advantage 0 and nothing
    else in the loss): they count in the denominators and cost nothing.
    """
    keep = step.advantages.in_loss.clone()
    if not carries_gradient(algorithm):
        keep &= step.advantages.advantages != 0
    offsets = step.advantages.offsets
    return [keep[offsets[g] : offsets[g + 1]].nonzero()[:, 0].tolist() for g in range(len(step.groups))]


def count(step: StepGroups) -> Denominators:
    """The global counts of the step, from the records alone."""
    tokens = sequences = groups = 0
    offsets = step.advantages.offsets
    for g, group in enumerate(step.groups):
        in_loss = step.advantages.in_loss[offsets[g] : offsets[g + 1]].tolist()
        lengths = [int(r.response_mask.sum()) for r, kept in zip(group.rollouts, in_loss, strict=True) if kept]
        lengths = [length for length in lengths if length]
        tokens, sequences, groups = tokens + sum(lengths), sequences + len(lengths), groups + bool(lengths)
    return Denominators(tokens, sequences, groups)


def plan_step(
    step: StepGroups, algorithm: AlgorithmConfig, mesh: Mesh, *, max_tokens: int
) -> list[PackedBatch]:
    """This data-parallel rank's micro-batches of the step, packed; as many as on every other rank."""
    samples = trained_samples(step, algorithm)
    lengths: list[GroupLengths] = []
    positions: list[int] = []
    for g, chosen in enumerate(samples):
        if chosen:
            lengths.append(measure(step.groups[g], chosen))
            positions.append(g)
    plans = plan_micro_batches(lengths, max_tokens, mesh.dp, split_groups=algorithm.aggregation != "group_mean")
    by_position = dict(enumerate(step.groups[g] for g in positions))
    packed = [pack(by_position, micro_batch, pad_multiple=mesh.tp) for micro_batch in plans[mesh.dp_rank]]
    return [_renumber(batch, positions) for batch in packed]


def _renumber(batch: PackedBatch, positions: Sequence[int]) -> PackedBatch:
    """The batch with group positions of the step instead of the plan's."""
    order = tuple((positions[group], sample) for group, sample in batch.rollout_order)
    return PackedBatch(**{**vars(batch), "rollout_order": order})


def loss_inputs(batch: PackedBatch, step: StepGroups, device: torch.device) -> LossInputs:
    """The constants of one packed micro-batch."""
    rollouts = [step.groups[group].rollouts[sample] for group, sample in batch.rollout_order]
    rows = [step.advantages.offsets[group] + sample for group, sample in batch.rollout_order]
    in_loss = batch.per_token(step.advantages.in_loss.numpy()[rows])
    join = lambda arrays: _join(arrays, device)  # noqa: E731 - three uses, one line
    references = [rollout.ref_logprobs for rollout in rollouts]
    has_reference = bool(rollouts) and all(reference is not None for reference in references)
    old = step.old_logprobs
    return LossInputs(
        old_logprobs=None if old is None else join([old[key] for key in batch.rollout_order]),
        rollout_logprobs=join([rollout.rollout_logprobs for rollout in rollouts]),
        advantages=torch.from_numpy(batch.per_token(step.advantages.advantages.numpy()[rows])).to(device),
        loss_mask=torch.from_numpy(in_loss & batch.response_mask).to(device),
        cu_seqlens=torch.from_numpy(batch.cu_seqlens).to(device),
        sequence_groups=torch.from_numpy(batch.group_positions).to(device),
        ref_logprobs=join([reference for reference in references if reference is not None]) if has_reference else None,
    )


def _join(arrays: Sequence[np.ndarray], device: torch.device) -> Tensor:
    joined = np.concatenate([np.zeros(0, np.float32), *arrays]).astype(np.float32, copy=False)
    return torch.from_numpy(joined).to(device)


def make_micro_batches(packed: Sequence[PackedBatch], step: StepGroups, device: torch.device) -> list[MicroBatch]:
    """The packed micro-batches with their constants, on the device."""
    return [make_micro_batch(batch, device, loss_inputs(batch, step, device)) for batch in packed]
