"""The training module: scored groups in, new weights and metrics out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist

from grpo_mc.algorithms.advantages import compute_advantages
from grpo_mc.algorithms.denominators import Denominators, count_denominators
from grpo_mc.algorithms.loss import apply_correction
from grpo_mc.algorithms.metrics import add_sums, loss_metrics
from grpo_mc.algorithms.schedule import learning_rate
from grpo_mc.config import Config
from grpo_mc.data.records import Group
from grpo_mc.megatron.mesh import Mesh
from grpo_mc.megatron.micro_batch import MicroBatch
from grpo_mc.megatron.train_step import Policy
from grpo_mc.pipeline.inference_module import RolloutLogprobs, logprobs_of_groups
from grpo_mc.pipeline.training_batch import StepGroups, count, make_micro_batches, plan_step


@dataclass(frozen=True)
class Update:
    """What one optimizer step came to."""

    sums: dict[str, float]
    """See Policy.backward; empty where there was nothing to train on."""
    norm: float = 0.0
    """The gradient's, before clipping."""
    changed: bool = False
    """Whether the weights were updated."""

    @property
    def is_empty(self) -> bool:
        """No token was in the loss, so no optimizer step was made."""
        return not self.sums


class TrainingModule:
    """Owns the policy that is trained, and its version."""

    def __init__(self, policy: Policy, mesh: Mesh, config: Config) -> None:
        self.policy, self.mesh, self.config = policy, mesh, config
        self.policy_version = 0
        self.is_updating = False
        """From the first optimizer step of a batch to the batch's end; stays true where a batch failed in between."""

    def run(self, step: int, groups: list[Group]) -> dict[str, float]:
        """Trains on one batch; the policy version rises by one, also where nothing was in the loss.

        Args:
            step: Training step, from 1.
            groups: Scored, the same on every rank.

        Returns:
            Metrics of training, the same on every rank. Of its optimizer steps, optimizer/steps changed the weights,
            optimizer/empty_steps had no token in the loss and optimizer/non_finite_steps no finite gradient: those two
            leave weights and optimizer as they are.
        """
        algorithm = self.config.algorithm
        advantages = compute_advantages(groups, algorithm, max_new_tokens=self.config.rollout.max_new_tokens)
        old_logprobs = self._old_logprobs(groups)
        lr = learning_rate(step - 1, self.config.optimizer, self.config.run.steps)
        updates = [
            self._update(StepGroups.choose(groups, advantages, old_logprobs, chosen), lr)
            for epoch in range(algorithm.epochs)
            for chosen in self._minibatches(step, epoch, len(groups))
        ]
        made = [update for update in updates if not update.is_empty]
        sums = add_sums(update.sums for update in made)
        metrics = {
            **loss_metrics(sums),
            "optimizer/lr": lr,
            "optimizer/steps": float(sum(update.changed for update in made)),
            "optimizer/empty_steps": float(len(updates) - len(made)),
            "optimizer/non_finite_steps": float(sum(not update.changed for update in made)),
            **staleness(groups, self.policy_version),
        }
        if groups:
            metrics["advantage/abs_max"] = float(advantages.advantages.abs().max())
        if made:
            metrics["loss"] = sums["loss"] / len(made)
            metrics["grad/norm"] = float(np.mean([update.norm for update in made]))
        self.policy_version += 1
        self.is_updating = False
        return metrics

    def _old_logprobs(self, groups: list[Group]) -> RolloutLogprobs | None:
        """One scoring pass before the first update, where the policy changes within the batch or a mask needs it."""
        algorithm = self.config.algorithm
        if algorithm.epochs * algorithm.minibatches == 1 and not algorithm.correction.startswith("mask"):
            return None
        return logprobs_of_groups(
            self.policy.model, self.mesh, groups, temperature=self.policy.temperature,
            max_tokens=self.config.inference.max_tokens_per_batch,
        )  # fmt: skip

    def _minibatches(self, step: int, epoch: int, num_groups: int) -> list[list[int]]:
        """Positions of the groups of each optimizer step of an epoch; in another order each epoch, keyed."""
        order = np.arange(num_groups)
        if epoch:
            key = np.random.SeedSequence([self.config.run.seed, step, epoch])
            order = np.random.Generator(np.random.Philox(key)).permutation(num_groups)
        return [sorted(part.tolist()) for part in np.array_split(order, self.config.algorithm.minibatches)]

    def _update(self, step: StepGroups, lr: float) -> Update:
        algorithm = self.config.algorithm
        denominators = count(step)
        if not denominators.tokens:
            return Update({})
        packed = plan_step(step, algorithm, self.mesh, max_tokens=self.config.parallel.max_tokens_per_micro_batch)
        batches = make_micro_batches(packed, step, self.mesh.device)
        if algorithm.correction != "none" and step.old_logprobs is not None:
            batches = [_corrected(batch, self.config) for batch in batches]
            if algorithm.correction.startswith("mask"):
                denominators = self._count_over_ranks(batches)
                if not denominators.tokens:
                    return Update({})
        sums = self.policy.backward(batches, denominators)
        self.is_updating = True
        changed, norm = self.policy.step(lr)
        return Update(sums, norm, changed)

    def _count_over_ranks(self, batches: list[MicroBatch]) -> Denominators:
        total = Denominators(0, 0, 0)
        for batch in batches:
            assert batch.loss is not None
            total = total + count_denominators(batch.loss.loss_mask, batch.loss.cu_seqlens, batch.loss.sequence_groups)
        counts = total.to_tensor().to(self.mesh.device)
        if self.mesh.dp > 1:
            dist.all_reduce(counts, group=self.mesh.dp_group)
        return Denominators.from_tensor(counts)


def _corrected(batch: MicroBatch, config: Config) -> MicroBatch:
    assert batch.loss is not None
    return replace(batch, loss=apply_correction(batch.loss, config.algorithm))


def staleness(groups: Sequence[Group], policy_version: int) -> dict[str, float]:
    """How many versions the trained policy is ahead of the oldest one that sampled a rollout: mean and max."""
    behind = [policy_version - min(r.policy_versions) for group in groups for r in group.rollouts]
    if not behind:
        return {}
    return {"staleness/mean": float(np.mean(behind)), "staleness/max": float(max(behind))}


def peak_memory_bytes(device: torch.device) -> float:
    """The most memory this process has held: of the device on CUDA, resident (VmHWM) on the CPU."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    with open("/proc/self/status", encoding="ascii") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return float(line.split()[1]) * 1024
    return math.nan
