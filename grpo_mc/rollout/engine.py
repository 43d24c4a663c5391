"""What every rollout engine takes and gives: requests in, responses out.

An engine samples; it knows no rewards, no queues and no training. `native.NativeEngine` samples from the training model
itself. The interface names nothing of it, so that an engine in another process can stand in its place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from grpo_mc.data.records import FinishReason, TokenIds
from grpo_mc.rollout.sampling import SamplingParams


@dataclass(frozen=True)
class Request:
    """A prompt and the samples wanted of it."""

    group_id: int
    prompt_ids: TokenIds
    """[P] int64, at least one token."""
    samples: tuple[int, ...]
    """Sample indices; they key the random numbers."""


@dataclass
class Response:
    """One sampled response."""

    group_id: int
    sample_index: int
    token_ids: list[int] = field(default_factory=list)
    """R sampled tokens, the end-of-sequence token included if there is one."""
    logprobs: list[float] = field(default_factory=list)
    """R log-probs under the distribution at the sampling temperature, unrestricted by top-k and top-p."""
    finish_reason: FinishReason = FinishReason.ABORTED
    """ABORTED until it ends."""


class RolloutEngine(Protocol):
    """An engine, as the rollout module sees it."""

    def generate(
        self, requests: list[Request], params: SamplingParams, on_ended: Callable[[int], None] | None = None
    ) -> list[Response]:
        """Samples every request to its end.

        Args:
            requests: Prompts with the samples wanted; none is legal.
            params: How tokens are drawn and when responses end.
            on_ended: Called with the number of responses that have ended, each time it has grown (a progress display).

        Returns:
            All responses, in the order of the requests and their samples.

        Raises:
            ValueError: A request that the model cannot serve.
        """
        ...
