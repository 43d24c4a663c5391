"""The colocated scheduler: the modules take turns in one process per rank, on one set of weights.

A step: collect scored groups (sampled, or replayed), compute reference log-probs where the objective asks for them,
train. The policy version rises once per training batch. Nothing waits in a queue longer than a step, so the staleness
of what is sampled here is 0.
"""

from __future__ import annotations

from typing import Protocol

from grpo_mc.data.records import Group
from grpo_mc.pipeline.clock import StageClock
from grpo_mc.pipeline.collectors import Collector
from grpo_mc.pipeline.inference_module import InferenceModule
from grpo_mc.pipeline.messages import BoundedQueue, GroupBatch


class Trainer(Protocol):
    """What becomes of a collected batch: weights and metrics, or metrics alone."""

    policy_version: int
    is_updating: bool
    """Whether the weights are between two policy versions."""

    def run(self, step: int, groups: list[Group]) -> dict[str, float]:
        """Uses one batch; returns its metrics, the same on every rank."""


class NoTraining:
    """The Trainer of a run that only samples: no optimizer is built, and the policy stays at version 0."""

    policy_version = 0
    is_updating = False

    def run(self, step: int, groups: list[Group]) -> dict[str, float]:
        """Nothing; the batch's figures are the collector's."""
        return {}


class Scheduler:
    """Runs steps. The queues stand where separate processes will have theirs."""

    def __init__(self, *, collector: Collector, training: Trainer, inference: InferenceModule | None) -> None:
        """
        Args:
            inference: None where nothing needs reference log-probs.
        """
        self.collector, self.training, self.inference = collector, training, inference
        self.inference_queue: BoundedQueue[GroupBatch] = BoundedQueue("inference", 1)
        self.training_queue: BoundedQueue[GroupBatch] = BoundedQueue("training", 1)

    def collect(self, step: int, clock: StageClock) -> GroupBatch:
        """Puts the groups of a step into the inference queue."""
        batch = self.collector.collect(step, self.training.policy_version, clock)
        self.inference_queue.put(batch)
        return batch

    def infer(self, clock: StageClock) -> None:
        """Moves a batch from the inference queue to the training queue, with reference log-probs where needed."""
        for batch in self.inference_queue.take():
            if self.inference is not None and batch.groups:
                with clock.stage("inference"):
                    self.inference.run(batch.groups)
            self.training_queue.put(batch)

    def train(self, clock: StageClock) -> dict[str, float]:
        """Trains on the batch in the training queue; returns the step's metrics."""
        metrics: dict[str, float] = {}
        for batch in self.training_queue.take():
            with clock.stage("train"):
                trained = self.training.run(batch.step, batch.groups)
            metrics = {**batch.metrics, **trained, **throughput(batch.groups, clock.seconds)}
        return metrics


def throughput(groups: list[Group], seconds: dict[str, float]) -> dict[str, float]:
    """time/<stage>_s, and the tokens per second of training (prompts and responses)."""
    metrics = {f"time/{stage}_s": value for stage, value in seconds.items()}
    sampled = sum(rollout.response_length for group in groups for rollout in group.rollouts)
    prompts = sum(len(group.prompt.token_ids) for group in groups)
    if seconds.get("train"):
        metrics["throughput/train_tokens_per_s"] = (sampled + prompts) / seconds["train"]
    return metrics
