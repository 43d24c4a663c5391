"""Log-probs and entropies of scored tokens, over a vocabulary that is split over the tensor-parallel ranks.

Each rank reads its own columns once (`token_logprob_stats`); four numbers a row are merged over the group, so neither
the logits nor the softmax of the whole vocabulary exist anywhere. Each rank then knows the merged statistics, and its
backward pass needs them alone. `vocab_parallel_logprobs` takes logits; `streamed_logprobs` takes hidden states and the
output layer's weight, and its logits exist a few columns at a time.

Shapes: S scored tokens, H hidden size, V vocabulary, V' columns of one rank (padding included).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_mc.ops import (
    linear_logprob_stats,
    linear_logprobs,
    linear_logprobs_backward,
    token_logprob_stats,
    token_logprobs,
    token_logprobs_backward,
)


def _merge(stats: tuple[Tensor, ...], group: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The shards' statistics -> (log-probs, logsumexp, entropy) [S] float64 of the whole vocabulary."""
    largest, sumexp, sum_p_logit, target = (x.double() for x in stats)
    top = largest.clone()
    dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
    # A shard of padding alone has largest = -inf and sums of 0.
    shift = torch.where(largest == -torch.inf, 0.0, largest - top)
    rescale = torch.where(largest == -torch.inf, 0.0, shift.exp())
    sums = torch.stack([sumexp * rescale, (sum_p_logit + shift * sumexp) * rescale, target])
    dist.all_reduce(sums, group=group)
    log_sum = sums[0].log()
    lse = top + log_sum
    return sums[2] - lse, lse, log_sum - sums[1] / sums[0]


class _VocabParallelLogprobs(torch.autograd.Function):
    """From a shard of the logits; see token_logprobs for the formulas."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, logits: Tensor, targets: Tensor, vocab_start: int, vocab_size: int, temperature: float, group: Any
    ) -> tuple[Tensor, Tensor]:
        options: dict[str, Any] = dict(vocab_start=vocab_start, vocab_size=vocab_size, temperature=temperature)
        logprobs, lse, entropy = _merge(token_logprob_stats(logits, targets, **options), group)
        ctx.save_for_backward(logits, targets, lse, entropy)
        ctx.options = options
        return logprobs.float(), entropy.float()

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        logits, targets, lse, entropy = ctx.saved_tensors
        grad = token_logprobs_backward(
            logits, targets, lse, entropy, grad_logprobs.contiguous(), grad_entropy.contiguous(), inplace=True,
            **ctx.options,
        )  # fmt: skip
        return grad, None, None, None, None, None


class _StreamedLogprobs(torch.autograd.Function):
    """From hidden states and a shard of the output weight; see linear_logprobs for the formulas."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, vocab_start: int, vocab_size: int,
        temperature: float, group: Any,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        options: dict[str, Any] = dict(vocab_start=vocab_start, vocab_size=vocab_size, temperature=temperature)
        logprobs, lse, entropy = _merge(linear_logprob_stats(hidden, weight, targets, **options), group)
        ctx.save_for_backward(hidden, weight, targets, lse, entropy)
        ctx.options, ctx.group = options, group
        return logprobs.float(), entropy.float()

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, targets, lse, entropy = ctx.saved_tensors
        grad_hidden, grad_weight = linear_logprobs_backward(
            hidden, weight, targets, lse, entropy, grad_logprobs.contiguous(), grad_entropy.contiguous(),
            wants=ctx.needs_input_grad[:2], **ctx.options,
        )  # fmt: skip
        if grad_hidden is not None:  # each rank has the part that its own columns give
            dist.all_reduce(grad_hidden, group=ctx.group)
        return grad_hidden, grad_weight, None, None, None, None, None


def vocab_parallel_logprobs(
    logits: Tensor, targets: Tensor, *, vocab_start: int, vocab_size: int, temperature: float, group: Any
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy of each row, under softmax(logits / temperature) over the whole vocabulary.

    Args:
        logits: [S, V'] this rank's columns. Backward writes their gradient over them.
        targets: [S] int64 in [0, vocab_size), the same on all ranks of the group.
        vocab_start: token id of column 0.
        vocab_size: V; columns past it are padding and never count.
        temperature: > 0.
        group: The tensor-parallel process group.

    Returns:
        logprobs [S] and entropy [S], float32, the same on all ranks.
    """
    if dist.get_world_size(group) == 1:
        result = token_logprobs(
            logits, targets, temperature=temperature, vocab_size=vocab_size, with_entropy=True,
            inplace_backward=logits.requires_grad,
        )  # fmt: skip
        return result[0], result[1]
    logprobs, entropy = _VocabParallelLogprobs.apply(logits, targets, vocab_start, vocab_size, temperature, group)
    return logprobs, entropy


def streamed_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, vocab_start: int, vocab_size: int, temperature: float,
    group: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """vocab_parallel_logprobs of hidden weight^T, whose logits never exist as a whole.

    Args:
        hidden: [S, H], the same on all ranks of the group; so is its gradient.
        weight: [V', H] this rank's rows of the output layer's weight, the dtype of hidden.
        targets, vocab_start, vocab_size, temperature, group: as in vocab_parallel_logprobs.

    Returns:
        logprobs [S] and entropy [S], float32, the same on all ranks.
    """
    if dist.get_world_size(group) == 1:
        result = linear_logprobs(
            hidden, weight, targets, temperature=temperature, vocab_size=vocab_size, with_entropy=True
        )
        return result[0].float(), result[1].float()
    logprobs, entropy = _StreamedLogprobs.apply(hidden, weight, targets, vocab_start, vocab_size, temperature, group)
    return logprobs, entropy
