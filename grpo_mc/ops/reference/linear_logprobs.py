"""Log-probabilities from hidden states and an output layer: the logits, then token_logprobs."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_mc.ops.reference.token_logprobs import token_logprob_stats, token_logprobs


def _logits(hidden: Tensor, weight: Tensor) -> Tensor:
    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    return hidden.to(wide) @ weight.to(wide).t()


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    with_entropy: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """token_logprobs of hidden [T, H] times weight [V, H] transposed."""
    return token_logprobs(
        _logits(hidden, weight), targets, temperature=temperature, vocab_size=vocab_size, with_entropy=with_entropy
    )


def linear_logprob_stats(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, vocab_start: int, vocab_size: int, temperature: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """token_logprob_stats of one shard's logits."""
    return token_logprob_stats(
        _logits(hidden, weight), targets, vocab_start=vocab_start, vocab_size=vocab_size, temperature=temperature
    )
