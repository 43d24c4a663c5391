"""What a reward function sees of a rollout, and what it answers.

`Sample` is the part of a `Rollout` that crosses to a reward worker: no log-probs, no arrays. A `Scorer` takes one
sample and answers `(value, reason)`; value None means that it abstains, and anything else must be a finite number
(grpo_mc.rewards.score turns it into a typed verdict).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from grpo_mc.data.records import Prompt, Rollout

Scorer = Callable[["Sample"], tuple[object, str]]


@dataclass(frozen=True)
class PromptView:
    """The prompt's side of a sample; one object serves all rollouts of a group, so it crosses to a worker once."""

    text: str
    messages: tuple[dict[str, str], ...] | None = None
    ground_truth: str | None = None
    data_source: str = ""
    fields: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_prompt(cls, prompt: Prompt) -> PromptView:
        """The view of `prompt`; its columns are shared, not copied."""
        return cls(prompt.text, prompt.messages, prompt.ground_truth, prompt.data_source, prompt.fields)


@dataclass(frozen=True)
class Sample:
    """One response to judge."""

    prompt: PromptView
    text: str
    """The response, decoded."""
    response_ids: tuple[int, ...] | None = None
    """The response's tokens; None where no configured function takes them."""

    @classmethod
    def from_rollout(cls, rollout: Rollout, prompt: PromptView | None = None, *, with_ids: bool = True) -> Sample:
        """The sample of `rollout`; `prompt` is its group's shared view when there is one."""
        view = prompt if prompt is not None else PromptView.from_prompt(rollout.prompt)
        ids = tuple(int(t) for t in rollout.response_ids) if with_ids else None
        return cls(view, rollout.text, ids)


NO_REFERENCE = (None, "the record has no ground truth")
"""The answer of every function that compares with a ground truth when the record has none."""

NO_ANSWER = "no answer found"
"""The reason given when extraction finds nothing: the response is wrong, score 0."""


def reference_answer(prompt: PromptView) -> str | None:
    """The ground truth as a bare answer: without surrounding space, after GSM8K's "####" where there is one."""
    if prompt.ground_truth is None:
        return None
    return prompt.ground_truth.rsplit("####", 1)[-1].strip()
