"""Groups and reward configurations for tests of rewards."""

from __future__ import annotations

from typing import Any

import numpy as np

from grpo_mc.config import RewardsConfig
from grpo_mc.data.records import FinishReason, Group, Prompt, Rollout, Segment
from grpo_mc.rewards import NamedScorer, Sample, build_functions
from grpo_mc.rewards.sample import PromptView


def make_prompt(ground_truth: str | None = None, text: str = "1 + 1 =", **fields: Any) -> Prompt:
    """A prompt with a ground truth and columns; messages and data_source are taken out of `fields`."""
    messages, source = fields.pop("messages", None), fields.pop("data_source", "")
    return Prompt("test:0", np.arange(3), text, messages, ground_truth, source, fields)


def make_group(responses: list[str], ground_truth: str | None = None, group_id: int = 0, **fields: Any) -> Group:
    """A group with one finished rollout for each response."""
    prompt = make_prompt(ground_truth, **fields)
    rollouts = [
        Rollout(group_id, i, prompt, [Segment("model", np.array([i, 7]))], text, FinishReason.FINISHED, (0,))
        for i, text in enumerate(responses)
    ]
    return Group(group_id, prompt, rollouts)


def rewards_config(*functions: dict[str, Any], **pool: Any) -> RewardsConfig:
    """The section `rewards` with these functions."""
    return RewardsConfig.model_validate({"functions": list(functions), **pool})


def make_scorer(**options: Any) -> NamedScorer:
    """One reward function, built in this process."""
    (scorer,) = build_functions(rewards_config(options).functions)
    return scorer


def score_text(scorer: NamedScorer, response: str, ground_truth: str | None = None, **fields: Any) -> Any:
    """The raw value that the function gives for a response."""
    prompt = PromptView.from_prompt(make_prompt(ground_truth, **fields))
    return scorer.score(Sample(prompt, response))[0]
