"""Measuring the policy on held-out prompts: accuracy and mean reward with their errors, and pass@k.

A response is right when the first reward function of the configuration scores it 1 (or more). The accuracy's error bar
is Wilson's (see error_bars). With several samples per prompt the standard error is that of the prompts' means, since
samples of one prompt are not independent. pass@k is the
unbiased estimator 1 - C(n - c, k) / C(n, k) of arXiv 2107.03374, n samples of which c are right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from grpo_mc.config import EvaluationConfig, RolloutConfig
from grpo_mc.data.dataset import PromptDataset
from grpo_mc.data.records import FinishReason, Group, Rollout
from grpo_mc.pipeline.error_bars import accuracy_error
from grpo_mc.pipeline.messages import PromptDraw
from grpo_mc.pipeline.reward_module import RewardModule
from grpo_mc.pipeline.rollout_module import RolloutModule
from grpo_mc.rollout.sampling import SamplingParams

FIRST_GROUP_ID = 1 << 48
"""Group ids of an evaluation: far from those of training, so that their random numbers differ."""


@dataclass(frozen=True)
class EvalResult:
    """An evaluation."""

    accuracy: float
    accuracy_error: float
    """Half width of its Wilson interval of one standard deviation; above 0 also where all or none are right."""
    stderr: float
    """Standard error of the prompts' means."""
    reward_mean: float
    reward_stderr: float
    n: int
    """Prompts."""
    num_samples: int
    """Responses per prompt."""
    unscored: int
    """Responses that the verifier could not score; they count as wrong, and not in reward_mean."""
    response_length: float
    truncated_frac: float
    pass_at: dict[int, float] = field(default_factory=dict)

    def record(self) -> dict[str, float]:
        """The figures by name, as evaluations.jsonl has them."""
        named = {name: value for name, value in vars(self).items() if name != "pass_at"}
        return {**named, **{f"pass@{k}": value for k, value in self.pass_at.items()}}


class HeldOut:
    """The held-out prompts, how they are sampled and who scores them."""

    def __init__(
        self, dataset: PromptDataset, config: EvaluationConfig, sampling: RolloutConfig, *, rollout: RolloutModule,
        rewards: RewardModule, on_progress: Callable[[int, int], None] | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            sampling: Section `rollout`, for what `config` leaves open.
            on_progress: Called on every rank with the responses that have ended and all that are wanted, as it goes on.
                With data parallelism a rank takes its own share as that of the others.
        """
        self.on_progress = on_progress
        self.dataset, self.config, self.rollout, self.rewards = dataset, config, rollout, rewards
        self.params = SamplingParams(
            temperature=config.temperature, top_k=sampling.top_k, top_p=sampling.top_p, stop=tuple(sampling.stop),
            max_new_tokens=config.max_new_tokens or sampling.max_new_tokens, ignore_eos=sampling.ignore_eos,
        )  # fmt: skip

    def measure(self, policy_version: int) -> EvalResult:
        """Samples and scores every prompt. All ranks call it together and get the same result."""
        draws = [PromptDraw(FIRST_GROUP_ID + at, self.dataset[at]) for at in range(len(self.dataset))]
        self._report(0)
        groups = self.rollout.run(
            draws, self.params, num_samples=self.config.num_samples, policy_version=policy_version,
            on_ended=self._report,
        )  # fmt: skip
        scored = self.rewards.run(groups)
        return summarise(scored, rewards_first_name(scored), self.config.pass_k)

    def _report(self, num_ended: int) -> None:
        total = len(self.dataset) * self.config.num_samples
        if self.on_progress is not None:
            self.on_progress(min(total, num_ended * self.rollout.mesh.dp), total)


def rewards_first_name(groups: Sequence[Group]) -> str:
    """Name of the first configured reward function, as the verdicts have it."""
    return next((r.verdicts[0].name for group in groups for r in group.rollouts if r.verdicts), "")


def is_right(rollout: Rollout, reward_name: str) -> bool:
    """Whether a response has the full score of this reward function."""
    return rollout.rewards.get(reward_name, 0.0) >= 1.0


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Probability that one of k samples is right, from `num_samples` of which `num_right` are."""
    if num_samples - num_right < k:
        return 1.0
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def standard_error(values: Sequence[float]) -> float:
    """Of the mean of independent values; 0 for fewer than two."""
    return float(np.std(values, ddof=1) / math.sqrt(len(values))) if len(values) > 1 else 0.0


def summarise(groups: Sequence[Group], reward_name: str, pass_k: Sequence[int]) -> EvalResult:
    """The figures of scored groups."""
    right = [[is_right(r, reward_name) for r in group.rollouts] for group in groups]
    accuracies = [float(np.mean(row)) for row in right if row]
    rewards = [float(np.mean(group.valid_rewards())) for group in groups if group.valid_rewards()]
    rollouts = [r for group in groups for r in group.rollouts]
    truncated = [r.finish_reason is FinishReason.TRUNCATED for r in rollouts]
    samples = len(groups[0].rollouts) if groups else 0
    pass_at = {k: float(np.mean([pass_at_k(len(row), sum(row), k) for row in right])) for k in pass_k if k <= samples}
    accuracy = float(np.mean(accuracies)) if accuracies else 0.0
    stderr = standard_error(accuracies)
    return EvalResult(
        accuracy=accuracy,
        accuracy_error=accuracy_error(accuracy, stderr, num_prompts=len(groups), num_samples=samples),
        stderr=stderr,
        reward_mean=float(np.mean(rewards)) if rewards else 0.0,
        reward_stderr=standard_error(rewards),
        n=len(groups),
        num_samples=samples,
        unscored=sum(r.reward is None for r in rollouts),
        response_length=float(np.mean([r.response_length for r in rollouts])) if rollouts else 0.0,
        truncated_frac=float(np.mean(truncated)) if rollouts else 0.0,
        pass_at=pass_at,
    )
