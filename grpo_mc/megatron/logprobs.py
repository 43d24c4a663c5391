"""Log-probs and entropies of scored tokens from logits that are split over the tensor-parallel ranks.

Each rank reads its own columns once (`token_logprob_stats`); four numbers a row are merged over the group, so neither
the logits nor the softmax of the whole vocabulary exist anywhere. Backward is local: each rank knows the merged
statistics.

Shapes: S scored tokens, V vocabulary, V' columns of one rank (padding included).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_mc.ops import token_logprob_stats, token_logprobs, token_logprobs_backward


class _VocabParallelLogprobs(torch.autograd.Function):
    """Merge of the shards' statistics; see token_logprobs for the formulas."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, logits: Tensor, targets: Tensor, vocab_start: int, vocab_size: int, temperature: float, group: Any
    ) -> tuple[Tensor, Tensor]:
        options: dict[str, Any] = dict(vocab_start=vocab_start, vocab_size=vocab_size, temperature=temperature)
        largest, sumexp, sum_p_logit, target = (x.double() for x in token_logprob_stats(logits, targets, **options))
        top = largest.clone()
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        # A shard of padding alone has largest = -inf and sums of 0.
        shift = torch.where(largest == -torch.inf, 0.0, largest - top)
        rescale = torch.where(largest == -torch.inf, 0.0, shift.exp())
        sums = torch.stack([sumexp * rescale, (sum_p_logit + shift * sumexp) * rescale, target])
        dist.all_reduce(sums, group=group)
        log_sum = sums[0].log()
        lse, entropy = top + log_sum, log_sum - sums[1] / sums[0]
        ctx.save_for_backward(logits, targets, lse, entropy)
        ctx.options = options
        return (sums[2] - lse).float(), entropy.float()

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        logits, targets, lse, entropy = ctx.saved_tensors
        grad = token_logprobs_backward(
            logits, targets, lse, entropy, grad_logprobs.contiguous(), grad_entropy.contiguous(), inplace=True,
            **ctx.options,
        )  # fmt: skip
        return grad, None, None, None, None, None


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
