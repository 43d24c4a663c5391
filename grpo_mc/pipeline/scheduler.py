"""The colocated scheduler: the four modules take turns in one process per rank, on one set of weights.

A step: draw prompts, sample groups, score them, sort out what cannot be trained on and sample again (bounded), compute
reference log-probs where the objective asks for them, train. The policy version rises once per training batch. Nothing
waits in a queue longer than a step, so staleness is 0.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from grpo_mc.algorithms.advantages import compute_advantages
from grpo_mc.algorithms.filtering import RefillState, filter_groups
from grpo_mc.config import Config
from grpo_mc.data.dataset import PromptDataset
from grpo_mc.data.records import Group
from grpo_mc.data.sampler import PromptSampler
from grpo_mc.pipeline.inference_module import InferenceModule
from grpo_mc.pipeline.messages import BoundedQueue, GroupBatch, PromptDraw
from grpo_mc.pipeline.reward_module import RewardModule
from grpo_mc.pipeline.rollout_module import RolloutModule
from grpo_mc.pipeline.training_module import TrainingModule
from grpo_mc.rollout.sampling import SamplingParams


class Progress(Protocol):
    """What the scheduler tells about where it is."""

    def stage(self, name: str) -> None:
        """A stage begins."""


class StageClock:
    """Wall time of each stage of a step, in seconds."""

    def __init__(self, progress: Progress) -> None:
        self.seconds: dict[str, float] = {}
        self._progress = progress

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Times the block, adding to what the stage took before in this step."""
        self._progress.stage(name)
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


class Scheduler:
    """Runs steps. The three queues stand where separate processes will have theirs."""

    def __init__(
        self, config: Config, dataset: PromptDataset, sampler: PromptSampler, *, rollout: RolloutModule,
        rewards: RewardModule, training: TrainingModule, inference: InferenceModule | None,
    ) -> None:  # fmt: skip
        self.config, self.dataset, self.sampler = config, dataset, sampler
        self.rollout, self.rewards, self.training, self.inference = rollout, rewards, training, inference
        wanted = config.data.prompts_per_step
        self.sampling_queue: BoundedQueue[PromptDraw] = BoundedQueue("sampling", wanted)
        self.inference_queue: BoundedQueue[GroupBatch] = BoundedQueue("inference", 1)
        self.training_queue: BoundedQueue[GroupBatch] = BoundedQueue("training", 1)
        self.params = SamplingParams(
            temperature=config.rollout.temperature, top_k=config.rollout.top_k, top_p=config.rollout.top_p,
            max_new_tokens=config.rollout.max_new_tokens, stop=tuple(config.rollout.stop),
            ignore_eos=config.rollout.ignore_eos,
        )  # fmt: skip

    def collect(self, step: int, clock: StageClock) -> GroupBatch:
        """Samples and scores the groups of a step, sampling again for those that are sorted out."""
        account = RefillState.start(self.config.data.prompts_per_step, self.config.algorithm)
        kept: list[Group] = []
        while wanted := account.next_round():
            for draw in self.sampler.draw(wanted):
                self.sampling_queue.put(PromptDraw(draw.group_id, self.dataset[draw.index]))
            with clock.stage("rollout"):
                groups = self.rollout.run(
                    self.sampling_queue.take(), self.params, num_samples=self.config.rollout.group_size,
                    policy_version=self.training.policy_version,
                )  # fmt: skip
            with clock.stage("rewards"):
                groups = self.rewards.run(groups)
            decision = filter_groups(self._judge(groups), self.config.algorithm)
            account = account.after_round(decision)
            kept += [groups[at] for at in decision.kept]
        batch = GroupBatch(step, kept, {name: float(value) for name, value in account.counters().items()})
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
                metrics = self.training.run(batch.step, batch.groups)
            metrics.update(batch.counters)
            metrics.update(throughput(batch.groups, clock.seconds))
        return metrics

    def _judge(self, groups: list[Group]):  # type: ignore[no-untyped-def]
        """Validity and spread of a round's groups; the KL in the reward comes later and does not change either."""
        algorithm = self.config.algorithm
        if algorithm.kl_placement == "in_reward" and algorithm.beta > 0:
            algorithm = algorithm.model_copy(update={"beta": 0.0})
        return compute_advantages(groups, algorithm, max_new_tokens=self.config.rollout.max_new_tokens)


def throughput(groups: list[Group], seconds: dict[str, float]) -> dict[str, float]:
    """time/<stage>_s, and tokens per second of sampling and training."""
    metrics = {f"time/{stage}_s": value for stage, value in seconds.items()}
    sampled = sum(rollout.response_length for group in groups for rollout in group.rollouts)
    prompts = sum(len(group.prompt.token_ids) for group in groups)
    if seconds.get("rollout"):
        metrics["throughput/rollout_tokens_per_s"] = sampled / seconds["rollout"]
    if seconds.get("train"):
        metrics["throughput/train_tokens_per_s"] = (sampled + prompts) / seconds["train"]
    return metrics
