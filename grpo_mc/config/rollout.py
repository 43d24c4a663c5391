"""Sections `rollout` and `inference`: how responses are sampled and how the reference model scores them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from grpo_mc.config.base import Section


class RolloutConfig(Section):
    """How responses are sampled for training."""

    engine: Literal["native"] = "native"
    """The engine that samples: "native" is the trained model itself with a KV cache."""
    group_size: int = Field(default=8, ge=1)
    """Rollouts for each prompt draw (G)."""
    max_new_tokens: int = Field(default=256, ge=1)
    """Longest response, in tokens; longer ones are truncated."""
    temperature: float = Field(default=1.0, gt=0)
    """Divides the logits when sampling and when log-probs are computed, on both sides alike."""
    top_k: int = Field(default=0, ge=0)
    """Sample only among the k likeliest tokens; 0 = off."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample only among the likeliest tokens whose probabilities sum to p; 1 = off."""
    stop: list[str] = Field(default_factory=list)
    """Strings that end a response."""
    ignore_eos: bool = False
    """Sample to max_new_tokens even after an end-of-sequence token (for measurements)."""
    max_batch_rows: int = Field(default=256, ge=1)
    """Most responses decoded at once on one data-parallel rank; the others wait."""
    kv_block_size: int = Field(default=16, ge=1)
    """Tokens in a block of the KV cache."""
    batch_invariant: bool = False
    """Compute every row alike bit for bit, whatever the batch, the worker or a retry; slower, and tp is 2 at most."""

    @field_validator("stop")
    @classmethod
    def _stop_strings_are_not_empty(cls, stop: list[str]) -> list[str]:
        if "" in stop:
            raise ValueError("an empty stop string would end every response at once; remove it")
        return stop


class InferenceConfig(Section):
    """How reference log-probs are computed."""

    max_tokens_per_batch: int = Field(default=4096, ge=1)
    """Most tokens in one forward pass of the reference model, on one rank."""
