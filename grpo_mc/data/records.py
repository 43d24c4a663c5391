"""The records that travel through the pipeline: prompts, rollouts, groups and verdicts.

One record travels from sampling to training, `Rollout`. A `Group` is the G rollouts of one prompt draw and is found
by its id, never by text or position. A response is a list of segments (by the model, by a tool), so that multi-turn
responses need no other record. Masks come from lengths and segment sources, never from token values: the padding
token of many models is also their end-of-sequence token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.int64]
Logprobs = npt.NDArray[np.float32]


class FinishReason(StrEnum):
    """How a rollout ended."""

    FINISHED = "finished"
    """The model ended it: an end-of-sequence token or a stop string."""
    TRUNCATED = "truncated"
    """It reached the token limit."""
    ABORTED = "aborted"
    """The run stopped it; its tokens are valid but the response is incomplete."""
    FAILED = "failed"
    """The engine could not produce it; it carries no usable tokens."""


class VerdictStatus(StrEnum):
    """What became of one reward function's look at one rollout. Only SCORED enters group statistics."""

    SCORED = "scored"
    ABSTAINED = "abstained"
    TIMED_OUT = "timed_out"
    CRASHED = "crashed"
    BAD_OUTPUT = "bad_output"
    """It answered, but not with a finite number."""


@dataclass(frozen=True)
class Verdict:
    """One reward function's judgement of one rollout."""

    name: str
    """The reward's name in the configuration."""
    status: VerdictStatus
    score: float | None = None
    """A finite number exactly when status is SCORED."""
    reason: str = ""
    """Why this score, or what went wrong; one line."""
    seconds: float = 0.0
    """Wall time of the judgement."""


@dataclass(frozen=True)
class Prompt:
    """One problem, ready to sample from."""

    prompt_id: str
    """Stable inside its source: "<source>:<row>"."""
    token_ids: TokenIds
    """[P] int64, what the engine samples from and the trainer trains on."""
    text: str
    """The text that token_ids encode."""
    messages: tuple[dict[str, str], ...] | None = None
    """The chat messages when the source had them."""
    ground_truth: str | None = None
    """The reference answer, for reward functions."""
    data_source: str = ""
    """The domain: verl's `data_source`, or the task's name."""
    fields: dict[str, Any] = field(default_factory=dict)
    """The other columns of the source record, handed to reward functions."""


@dataclass
class Segment:
    """A stretch of a response by one author."""

    source: str
    """"model" (sampled: trained on) or "tool" (inserted: attended to, never trained on)."""
    token_ids: TokenIds
    """[R] int64."""
    logprobs: Logprobs | None = None
    """[R] float32 rollout log-probs for a "model" segment, None for a "tool" segment."""


@dataclass
class Rollout:
    """One prompt, one response and its record."""

    group_id: int
    """The prompt draw; rises by one per draw and never repeats in a run."""
    sample_index: int
    """0 .. G-1 inside the group."""
    prompt: Prompt
    segments: list[Segment]
    text: str
    """The response decoded, without the end-of-sequence token and cut before a stop string."""
    finish_reason: FinishReason
    policy_versions: tuple[int, ...]
    """The policy versions that sampled it, oldest first."""
    ref_logprobs: Logprobs | None = None
    """[R] float32 under the frozen reference policy; entry t scores response token t."""
    rewards: dict[str, float] = field(default_factory=dict)
    """Scores by reward name; only SCORED ones."""
    verdicts: list[Verdict] = field(default_factory=list)
    reward: float | None = None
    """The weighted sum of the scored rewards; None = unscored: no advantage, not in the loss."""

    @property
    def response_ids(self) -> TokenIds:
        """[R] int64, all segments joined."""
        return np.concatenate([s.token_ids for s in self.segments]) if self.segments else np.zeros(0, np.int64)

    @property
    def rollout_logprobs(self) -> Logprobs:
        """[R] float32; 0 where a tool wrote the token (masked by response_mask, so never used as data)."""
        parts = [np.zeros(len(s.token_ids), np.float32) if s.logprobs is None else s.logprobs for s in self.segments]
        return np.concatenate(parts) if parts else np.zeros(0, np.float32)

    @property
    def response_mask(self) -> npt.NDArray[np.bool_]:
        """[R] bool, true on tokens that the model sampled."""
        parts = [np.full(len(s.token_ids), s.source == "model") for s in self.segments]
        return np.concatenate(parts) if parts else np.zeros(0, bool)

    @property
    def response_length(self) -> int:
        """Tokens in the response, all segments."""
        return sum(len(s.token_ids) for s in self.segments)


@dataclass
class Group:
    """The G rollouts of one prompt draw."""

    group_id: int
    prompt: Prompt
    rollouts: list[Rollout]

    def valid_rewards(self) -> list[float]:
        """The rewards of the scored rollouts, in sample order."""
        return [r.reward for r in self.rollouts if r.reward is not None]
