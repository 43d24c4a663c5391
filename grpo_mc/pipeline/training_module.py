"""The training module: scored groups in, new weights and metrics out."""

from __future__ import annotations

import logging
import math
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist

from grpo_mc.algorithms.advantages import AdvantageResult, compute_advantages
from grpo_mc.algorithms.denominators import Denominators, count_denominators
from grpo_mc.algorithms.loss import apply_correction
from grpo_mc.algorithms.metrics import add_sums, batch_metrics, loss_metrics
from grpo_mc.algorithms.schedule import learning_rate
from grpo_mc.config import Config
from grpo_mc.data.records import Group
from grpo_mc.megatron.mesh import Mesh
from grpo_mc.megatron.micro_batch import MicroBatch
from grpo_mc.megatron.train_step import Policy
from grpo_mc.pipeline.inference_module import RolloutLogprobs, logprobs_of_groups
from grpo_mc.pipeline.training_batch import StepGroups, count, make_micro_batches, plan_step

_log = logging.getLogger(__name__)

MAX_SKIPPED_UPDATES = 3
"""So many optimizer steps in a row with a gradient that is not finite end the run."""


class TrainingModule:
    """Owns the policy that is trained, and its version."""

    def __init__(self, policy: Policy, mesh: Mesh, config: Config) -> None:
        self.policy, self.mesh, self.config = policy, mesh, config
        self.policy_version = 0
        self.skipped_in_a_row = 0

    def run(self, step: int, groups: list[Group]) -> dict[str, float]:
        """Trains on one batch; the policy version rises by one.

        Args:
            step: Training step, from 1.
            groups: Scored, the same on every rank.

        Returns:
            Metrics of the step, the same on every rank.

        Raises:
            RuntimeError: The gradient was not finite for MAX_SKIPPED_UPDATES optimizer steps in a row.
        """
        algorithm = self.config.algorithm
        advantages = self._advantages(groups)
        old_logprobs = self._old_logprobs(groups)
        lr = learning_rate(step - 1, self.config.optimizer, self.config.run.steps)
        sums: list[dict[str, float]] = []
        norms: list[float] = []
        for epoch in range(algorithm.epochs):
            for chosen in self._minibatches(step, epoch, len(groups)):
                part = [groups[g] for g in chosen]
                part_advantages = advantages if len(part) == len(groups) else self._advantages(part)
                old = None if old_logprobs is None else _renumbered(old_logprobs, chosen)
                part_sums, norm = self._update(StepGroups(part, part_advantages, old), lr)
                sums.append(part_sums)
                norms.append(norm)
        self.policy_version += 1
        staleness = [self.policy_version - 1 - min(r.policy_versions) for g in groups for r in g.rollouts]
        total = add_sums(sums)
        return {
            **batch_metrics(groups, advantages),
            **loss_metrics(total),
            "loss": total.get("loss", 0.0) / max(1, len(sums)),
            "grad/norm": float(np.mean(norms)) if norms else 0.0,
            "optimizer/lr": lr,
            "optimizer/steps": float(len(norms)),
            "staleness/mean": float(np.mean(staleness)) if staleness else 0.0,
            "staleness/max": float(max(staleness, default=0)),
        }

    def _advantages(self, groups: list[Group]) -> AdvantageResult:
        return compute_advantages(groups, self.config.algorithm, max_new_tokens=self.config.rollout.max_new_tokens)

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
        order = list(range(num_groups))
        if epoch:
            key = np.random.SeedSequence([self.config.run.seed, step, epoch])
            order = np.random.Generator(np.random.Philox(key)).permutation(num_groups).tolist()
        parts = np.array_split(np.array(order, np.int64), self.config.algorithm.minibatches)
        return [sorted(part.tolist()) for part in parts if len(part)]

    def _update(self, step: StepGroups, lr: float) -> tuple[dict[str, float], float]:
        algorithm = self.config.algorithm
        packed = plan_step(step, algorithm, self.mesh, max_tokens=self.config.parallel.max_tokens_per_micro_batch)
        batches = make_micro_batches(packed, step, self.mesh.device)
        denominators = count(step)
        if algorithm.correction != "none" and step.old_logprobs is not None:
            batches = [_corrected(batch, self.config) for batch in batches]
            if algorithm.correction.startswith("mask"):
                denominators = self._count_over_ranks(batches)
        sums = self.policy.backward(batches, denominators)
        updated, norm = self.policy.step(lr)
        self._watch(updated, norm)
        return sums, norm

    def _count_over_ranks(self, batches: list[MicroBatch]) -> Denominators:
        total = Denominators(0, 0, 0)
        for batch in batches:
            assert batch.loss is not None
            total = total + count_denominators(batch.loss.loss_mask, batch.loss.cu_seqlens, batch.loss.sequence_groups)
        counts = total.to_tensor().to(self.mesh.device)
        if self.mesh.dp > 1:
            dist.all_reduce(counts, group=self.mesh.dp_group)
        return Denominators.from_tensor(counts)

    def _watch(self, updated: bool, norm: float) -> None:
        if updated:
            self.skipped_in_a_row = 0
            return
        self.skipped_in_a_row += 1
        _log.warning("the gradient's norm is %s: this update is skipped and the weights stay", norm)
        if self.skipped_in_a_row >= MAX_SKIPPED_UPDATES:
            raise RuntimeError(
                f"train: the gradient was not finite in {MAX_SKIPPED_UPDATES} optimizer steps in a row (norm {norm});"
                " lower optimizer.lr, or use model.dtype fp32; earlier checkpoints are good"
            )


def _renumbered(logprobs: RolloutLogprobs, chosen: list[int]) -> RolloutLogprobs:
    new_position = {group: at for at, group in enumerate(chosen)}
    return {(new_position[g], sample): x for (g, sample), x in logprobs.items() if g in new_position}


def _corrected(batch: MicroBatch, config: Config) -> MicroBatch:
    assert batch.loss is not None
    return replace(batch, loss=apply_correction(batch.loss, config.algorithm))


def peak_memory_bytes(device: torch.device) -> float:
    """The most memory this process has held: of the device on CUDA, resident (VmHWM) on the CPU."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    with open("/proc/self/status", encoding="ascii") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return float(line.split()[1]) * 1024
    return math.nan
