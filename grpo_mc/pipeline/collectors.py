"""Where the scored groups of a training step come from: sampled now, or read from the rollouts of an earlier run.

The scheduler knows the `Collector` only. What a collector remembers between steps is in its state_dict, which goes into
checkpoints, so that a resumed run collects what the uninterrupted one would have collected.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from grpo_mc.algorithms.advantages import AdvantageResult, compute_advantages
from grpo_mc.algorithms.filtering import FilterDecision, RefillState, filter_groups
from grpo_mc.algorithms.metrics import batch_metrics
from grpo_mc.config import Config
from grpo_mc.data.dataset import PromptDataset
from grpo_mc.data.records import Group
from grpo_mc.data.sampler import PromptSampler
from grpo_mc.pipeline.clock import StageClock
from grpo_mc.pipeline.messages import BoundedQueue, GroupBatch, PromptDraw
from grpo_mc.pipeline.reward_module import RewardModule
from grpo_mc.pipeline.rollout_log import read_rollouts
from grpo_mc.pipeline.rollout_module import RolloutModule
from grpo_mc.rollout.sampling import SamplingParams

Selection = Callable[[list[Group]], FilterDecision]
"""Sorts the groups of one round into those that are used and those that are not."""


class Collector(Protocol):
    """A source of scored groups. Every rank makes the same calls and gets the same groups."""

    def collect(self, step: int, policy_version: int, clock: StageClock) -> GroupBatch:
        """The groups of a training step (from 1), with what happened on the way."""

    def state_dict(self) -> dict[str, Any]:
        """Where it stands, as JSON values."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where `state` was taken."""


def judge(groups: list[Group], config: Config) -> AdvantageResult:
    """Validity and spread of scored groups, before reference log-probs exist.

    The KL in the reward comes later; it changes neither.
    """
    algorithm = config.algorithm
    if algorithm.kl_placement == "in_reward" and algorithm.beta > 0:
        algorithm = algorithm.model_copy(update={"beta": 0.0})
    return compute_advantages(groups, algorithm, max_new_tokens=config.rollout.max_new_tokens)


def describe(groups: list[Group], config: Config) -> dict[str, float]:
    """Metrics of rewards and responses of scored groups (see batch_metrics)."""
    return batch_metrics(groups, judge(groups, config))


def select_trainable(config: Config) -> Selection:
    """Takes what can be trained on, as section `algorithm` says."""
    return lambda groups: filter_groups(judge(groups, config), config.algorithm)


def select_all(groups: list[Group]) -> FilterDecision:
    """Takes every group."""
    return FilterDecision(tuple(range(len(groups))), (), ())


class SamplingCollector:
    """Draws prompts, samples groups, scores them, and samples again (bounded) for those that are sorted out."""

    def __init__(
        self, config: Config, dataset: PromptDataset, *, rollout: RolloutModule, rewards: RewardModule,
        select: Selection,
    ) -> None:  # fmt: skip
        self.config, self.dataset, self.rollout, self.rewards, self.select = config, dataset, rollout, rewards, select
        self.sampler = PromptSampler(len(dataset), seed=config.run.seed, shuffle=config.data.shuffle)
        self.queue: BoundedQueue[PromptDraw] = BoundedQueue("sampling", config.data.prompts_per_step)
        self.params = SamplingParams(
            temperature=config.rollout.temperature, top_k=config.rollout.top_k, top_p=config.rollout.top_p,
            max_new_tokens=config.rollout.max_new_tokens, stop=tuple(config.rollout.stop),
            ignore_eos=config.rollout.ignore_eos,
        )  # fmt: skip

    def collect(self, step: int, policy_version: int, clock: StageClock) -> GroupBatch:
        """See Collector; the stages are `rollout` and `rewards`."""
        account = RefillState.start(self.config.data.prompts_per_step, self.config.algorithm)
        sampled: list[Group] = []
        kept: list[Group] = []
        while wanted := account.next_round():
            for draw in self.sampler.draw(wanted):
                self.queue.put(PromptDraw(draw.group_id, self.dataset[draw.index]))
            draws = self.queue.take()
            with clock.stage("rollout"):
                groups = self.rollout.run(
                    draws, self.params, num_samples=self.config.rollout.group_size, policy_version=policy_version
                )
            with clock.stage("rewards"):
                groups = self.rewards.run(groups)
            decision = self.select(groups)
            account = account.after_round(decision)
            sampled += groups
            kept += [groups[at] for at in decision.kept]
        metrics = {**describe(sampled, self.config), **{name: float(n) for name, n in account.counters().items()}}
        num_tokens = sum(rollout.response_length for group in sampled for rollout in group.rollouts)
        metrics["throughput/rollout_tokens_per_s"] = num_tokens / clock.seconds["rollout"]
        return GroupBatch(step, kept, metrics)

    def state_dict(self) -> dict[str, Any]:
        """The sampler's."""
        return dict(self.sampler.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See Collector."""
        self.sampler.load_state_dict(state)


class ReplayCollector:
    """The recorded batches of a run, one after the other: the k-th recorded step is trained on in step k.

    Token ids, rollout log-probs, rewards and policy versions are those of the record, and nothing is sampled or scored.
    Replayed from the weights that the recorded run started from, with its configuration, the batches give its weights
    bit for bit. Staleness counts from the recorded versions: 0 in such a replay; negative where the rollouts of later
    versions are trained on by earlier ones.
    """

    def __init__(self, config: Config, path: str | Path, *, vocab_size: int) -> None:
        """Reads all of it.

        Raises:
            ValueError: nothing readable there, fewer recorded steps than run.steps, or tokens that the model does not
                know.
        """
        self.config, self.select = config, select_trainable(config)
        self.batches = [groups for _, groups in read_rollouts(path)]
        self.position = 0
        if len(self.batches) < config.run.steps:
            raise ValueError(
                f"replay: {path} holds the rollouts of {len(self.batches)} steps but run.steps is {config.run.steps};"
                f" set run.steps to at most {len(self.batches)}"
            )
        largest = max((largest_token(group) for groups in self.batches for group in groups), default=0)
        if largest >= vocab_size:
            raise ValueError(
                f"replay: {path} holds token {largest} but the model knows {vocab_size} tokens;"
                " name the model that the rollouts were sampled from in model.path"
            )

    def collect(self, step: int, policy_version: int, clock: StageClock) -> GroupBatch:
        """See Collector; the stage is `replay`."""
        with clock.stage("replay"):
            groups = self.batches[self.position]
            self.position += 1
            decision = self.select(groups)
            metrics = {
                **describe(groups, self.config),
                "filter/sampled_groups": float(len(groups)),
                "filter/kept_groups": float(len(decision.kept)),
                "filter/filtered_groups": float(len(decision.filtered)),
                "filter/dropped_groups": float(len(decision.dropped)),
            }
            return GroupBatch(step, [groups[at] for at in decision.kept], metrics)

    def state_dict(self) -> dict[str, Any]:
        """How many recorded batches were used."""
        return {"replayed": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See Collector.

        Raises:
            ValueError: the state is of a run that samples.
        """
        if set(state) != {"replayed"}:
            raise ValueError(
                f"replay: the saved state has the entries {sorted(state)}, needed is 'replayed';"
                " it is of a run that samples: resume it with pipeline.mode=train"
            )
        self.position = int(state["replayed"])


def largest_token(group: Group) -> int:
    """The largest token id in a group's prompt and responses; 0 for none."""
    arrays = [group.prompt.token_ids, *(segment.token_ids for r in group.rollouts for segment in r.segments)]
    return max((int(ids.max()) for ids in arrays if len(ids)), default=0)
