"""From scored groups to the micro-batches of one optimizer step: what is trained on, with which constants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from grpo_mc.algorithms.advantages import AdvantageResult
from grpo_mc.algorithms.denominators import Denominators
from grpo_mc.algorithms.loss import LossInputs
from grpo_mc.config import AlgorithmConfig
from grpo_mc.data.micro_batches import GroupLengths, measure, plan_micro_batches
from grpo_mc.data.packing import PackedBatch, pack
from grpo_mc.data.records import Group, Rollout
from grpo_mc.megatron.mesh import Mesh
from grpo_mc.megatron.micro_batch import MicroBatch, make_micro_batch
from grpo_mc.pipeline.inference_module import RolloutLogprobs


@dataclass(frozen=True)
class StepGroups:
    """The groups of one optimizer step and what is known of them, the same on every rank: N rollouts in G groups."""

    groups: list[Group]
    advantages: npt.NDArray[np.float32]
    """[N] float32, of the groups' rollouts in order."""
    in_loss: npt.NDArray[np.bool_]
    """[N] bool."""
    offsets: npt.NDArray[np.int64]
    """[G + 1] int64: group g is rows offsets[g] to offsets[g + 1]."""
    old_logprobs: RolloutLogprobs | None
    """None = the current policy itself (one optimizer step per batch)."""

    @classmethod
    def choose(
        cls, groups: Sequence[Group], result: AdvantageResult, old_logprobs: RolloutLogprobs | None,
        chosen: Sequence[int],
    ) -> StepGroups:  # fmt: skip
        """The groups at the positions `chosen` of a training batch, with their part of its advantages.

        Advantages are never computed from a part of the batch: a std over the batch would change.
        """
        starts = [range(result.offsets[g], result.offsets[g + 1]) for g in chosen]
        rows = np.array([row for group in starts for row in group], np.int64)
        old = None
        if old_logprobs is not None:
            position = {group: at for at, group in enumerate(chosen)}
            old = {(position[g], sample): x for (g, sample), x in old_logprobs.items() if g in position}
        return cls(
            [groups[g] for g in chosen], result.advantages.numpy()[rows], result.in_loss.numpy()[rows],
            np.cumsum([0, *map(len, starts)], dtype=np.int64), old,
        )  # fmt: skip


def carries_gradient(algorithm: AlgorithmConfig) -> bool:
    """Whether a token with advantage 0 can still have a gradient or change a denominator."""
    kl = algorithm.beta > 0 and algorithm.kl_placement == "in_loss"
    return kl or algorithm.entropy_coef > 0 or algorithm.correction.startswith("mask")


def trained_samples(step: StepGroups, algorithm: AlgorithmConfig) -> list[list[int]]:
    """Positions of the rollouts to run through the model, per group.

    Rollouts outside the loss are left out, and so are those whose gradient is exactly zero (advantage 0 and nothing
    else in the loss): they count in the denominators and cost nothing.
    """
    keep = step.in_loss
    if not carries_gradient(algorithm):
        keep = keep & (step.advantages != 0)
    return [np.flatnonzero(of_group).tolist() for of_group in np.split(keep, step.offsets[1:-1])[: len(step.groups)]]


def count(step: StepGroups) -> Denominators:
    """The global counts of the step, from the records alone."""
    tokens = sequences = groups = 0
    in_loss = iter(step.in_loss.tolist())
    for group in step.groups:
        lengths = [sampled_tokens(rollout) for rollout in group.rollouts if next(in_loss)]
        lengths = [length for length in lengths if length]
        tokens, sequences, groups = tokens + sum(lengths), sequences + len(lengths), groups + bool(lengths)
    return Denominators(tokens, sequences, groups)


def sampled_tokens(rollout: Rollout) -> int:
    """Response tokens that the model sampled."""
    return sum(len(segment.token_ids) for segment in rollout.segments if segment.source == "model")


def plan_step(step: StepGroups, algorithm: AlgorithmConfig, mesh: Mesh, *, max_tokens: int) -> list[PackedBatch]:
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
    rows = np.array([step.offsets[group] + sample for group, sample in batch.rollout_order], np.int64)
    in_loss = batch.per_token(step.in_loss[rows]).astype(bool)
    join = partial(_join, device=device)
    references = [rollout.ref_logprobs for rollout in rollouts]
    has_reference = bool(rollouts) and all(reference is not None for reference in references)
    old = step.old_logprobs
    return LossInputs(
        old_logprobs=None if old is None else join([old[key] for key in batch.rollout_order]),
        rollout_logprobs=join([rollout.rollout_logprobs for rollout in rollouts]),
        advantages=torch.from_numpy(batch.per_token(step.advantages[rows])).to(device),
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
