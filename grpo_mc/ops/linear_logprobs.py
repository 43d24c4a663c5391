"""Log-probabilities (and entropies) straight from hidden states and an output layer, streamed over the vocabulary.

    logits = hidden weight^T          then as token_logprobs; the [T, V] logits never exist

The vocabulary goes by in chunks of CHUNK_COLUMNS: their logits are one product into a buffer that is reused, their
statistics are merged into running ones (see token_logprobs for the formulas). Backward computes each chunk's logits
again, turns them into their gradient in place, and multiplies it into both gradients: three products where the plain
form has two, and 1/24 of its memory at 49,152 tokens. Products are BLAS's, so results agree over threads to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from grpo_mc.ops.device import check_devices
from grpo_mc.ops.token_logprobs import token_logprob_stats, token_logprobs_backward

CHUNK_COLUMNS = 2048
"""Columns of logits that exist at once: of 49,152 a part of 1/24."""


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    with_entropy: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Log-probability of targets[t] under softmax(hidden[t] weight^T / temperature), and the entropy.

    Args:
        hidden: [T, H] float32, bfloat16 or float64; differentiable.
        weight: [V, H], the dtype of hidden; differentiable. A frozen one costs no gradient.
        targets: [T] int64 in [0, vocab_size).
        temperature: > 0; the one the tokens were sampled with.
        vocab_size: rows of weight that are real tokens; those after it are padding and get gradient 0. None = V.
        with_entropy: also return the entropy of each row, differentiable.

    Returns:
        logprobs [T], or (logprobs [T], entropy [T]): float64 for float64 inputs, else float32.

    Raises:
        ValueError: shapes, dtypes, temperature, vocab_size or a target out of range; tensors on two devices. Targets
            on a GPU are not read back: there one out of range makes its token's log-prob NaN.
    """
    _check("linear_logprobs", hidden, weight, targets)
    size = len(weight) if vocab_size is None else vocab_size
    if not 1 <= size <= len(weight):
        raise ValueError(f"linear_logprobs: vocab_size is {size}; it must be 1 to {len(weight)}, the rows of weight")
    logprobs, entropy, _ = torch.ops.grpo_mc.linear_logprobs(hidden, weight, targets, temperature, size, with_entropy)
    return (logprobs, entropy) if with_entropy else logprobs


def linear_logprob_stats(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, vocab_start: int, vocab_size: int, temperature: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """token_logprob_stats of hidden weight^T, for a weight that is one shard of the vocabulary; no gradient.

    Args:
        hidden: [T, H].
        weight: [V', H] this shard's rows; row j is token vocab_start + j.
        targets, vocab_start, vocab_size, temperature: as in token_logprob_stats.

    Returns:
        (max, sumexp, sum_p_logit, target_logit), each [T] float64.

    Raises:
        ValueError: as token_logprob_stats; shapes or dtypes that do not fit.
    """
    _check("linear_logprob_stats", hidden, weight, targets)
    return _stats(hidden.detach(), weight.detach(), targets, vocab_start, vocab_size, temperature)


def linear_logprobs_backward(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    lse: Tensor,
    entropy: Tensor | None,
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None,
    *,
    temperature: float,
    vocab_start: int,
    vocab_size: int,
    wants: tuple[bool, bool] = (True, True),
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of a loss with respect to hidden and one shard's weight.

    Args:
        hidden, weight, targets, vocab_start, vocab_size, temperature: as in linear_logprob_stats.
        lse: [T] float64, logsumexp over the whole vocabulary.
        entropy: [T] of the whole vocabulary; None exactly when grad_entropy is None.
        grad_logprobs: [T].
        grad_entropy: [T] or None.
        wants: whether the gradient of hidden, and that of weight, is wanted.

    Returns:
        (this shard's part of the gradient of hidden [T, H], gradient of weight [V', H]), None where not wanted.

    Raises:
        ValueError: as linear_logprob_stats.
    """
    _check("linear_logprobs_backward", hidden, weight, targets)
    hidden, weight = hidden.detach(), weight.detach()
    wide = _wide(hidden)
    rows, buffer = hidden.to(wide), _buffer(hidden, weight)
    grad_hidden = torch.zeros(hidden.shape, dtype=wide, device=hidden.device) if wants[0] else None
    grad_weight = torch.empty(weight.shape, dtype=wide, device=weight.device) if wants[1] else None
    for first, part, logits in _chunks(rows, weight, buffer):
        grad = token_logprobs_backward(
            logits, targets, lse, entropy, grad_logprobs, grad_entropy, temperature=temperature,
            vocab_start=vocab_start + first, vocab_size=vocab_size, inplace=True,
        )  # fmt: skip
        real = min(max(vocab_size - vocab_start - first, 0), len(part))  # padding may hold anything, NaN too
        if grad_hidden is not None and real:
            grad_hidden.addmm_(grad[:, :real], part[:real])
        if grad_weight is not None:
            torch.mm(grad.t(), rows, out=grad_weight[first : first + len(part)])
    return (
        None if grad_hidden is None else grad_hidden.to(hidden.dtype),
        None if grad_weight is None else grad_weight.to(weight.dtype),
    )


def _wide(hidden: Tensor) -> torch.dtype:
    """Products are taken in float32: a bfloat16 logit has too few digits for a log-prob (H09)."""
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


def _buffer(hidden: Tensor, weight: Tensor) -> Tensor:
    return torch.empty(len(hidden) * min(CHUNK_COLUMNS, len(weight)), dtype=_wide(hidden), device=hidden.device)


def _chunks(rows: Tensor, weight: Tensor, buffer: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(first row of weight, the chunk's rows, their logits [T, rows] in the buffer)."""
    for first in range(0, len(weight), CHUNK_COLUMNS):
        part = weight[first : first + CHUNK_COLUMNS].to(rows.dtype)
        logits = buffer[: len(rows) * len(part)].view(len(rows), len(part))
        torch.mm(rows, part.t(), out=logits)
        yield first, part, logits


def _stats(
    hidden: Tensor, weight: Tensor, targets: Tensor, vocab_start: int, vocab_size: int, temperature: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    def zeros() -> Tensor:
        return torch.zeros(len(hidden), dtype=torch.float64, device=hidden.device)

    top, sumexp, sum_p_logit, target = zeros() - torch.inf, zeros(), zeros(), zeros()
    rows, buffer = hidden.to(_wide(hidden)), _buffer(hidden, weight)
    for first, _, logits in _chunks(rows, weight, buffer):
        largest, s, u, t = (
            x.double()
            for x in token_logprob_stats(
                logits, targets, vocab_start=vocab_start + first, vocab_size=vocab_size, temperature=temperature
            )
        )
        higher = torch.maximum(top, largest)
        # Where nothing was seen yet, or this chunk is padding alone, the side is -inf and counts for nothing.
        before, now = (torch.where(side == -torch.inf, 0.0, side - higher) for side in (top, largest))
        old, new = (
            torch.where(side == -torch.inf, 0.0, shift.exp()) for side, shift in ((top, before), (largest, now))
        )
        sum_p_logit = old * (sum_p_logit + before * sumexp) + new * (u + now * s)
        sumexp = old * sumexp + new * s
        target, top = target + t, higher
    return top, sumexp, sum_p_logit, target


def _check(op: str, hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    check_devices(op, hidden=hidden, weight=weight, targets=targets)
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"{op}: hidden is {list(hidden.shape)} and weight {list(weight.shape)}; they must be [T, H] and [V, H]"
        )
    if hidden.dtype != weight.dtype or hidden.dtype not in (torch.float32, torch.bfloat16, torch.float64):
        raise ValueError(
            f"{op}: hidden is {hidden.dtype} and weight {weight.dtype}; they must be both float32, bfloat16 or float64"
        )


@torch.library.custom_op("grpo_mc::linear_logprobs", mutates_args=())
def _linear_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, vocab_size: int, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    top, sumexp, sum_p_logit, target = _stats(hidden, weight, targets, 0, vocab_size, temperature)
    log_sum = sumexp.log()
    lse, dtype = top + log_sum, _wide(hidden)
    entropy = (log_sum - sum_p_logit / sumexp).to(dtype) if with_entropy else lse.new_empty(0, dtype=dtype)
    return (target - lse).to(dtype), entropy, lse


@torch.library.register_fake("grpo_mc::linear_logprobs")
def _fake(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, vocab_size: int, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, dtype = hidden.shape[0], _wide(hidden)
    entropy = hidden.new_empty(tokens if with_entropy else 0, dtype=dtype)
    return hidden.new_empty(tokens, dtype=dtype), entropy, hidden.new_empty(tokens, dtype=torch.float64)


@torch.library.custom_op("grpo_mc::linear_logprobs_backward", mutates_args=())
def _linear_logprobs_backward(
    hidden: Tensor, weight: Tensor, targets: Tensor, lse: Tensor, entropy: Tensor, grad_logprobs: Tensor,
    grad_entropy: Tensor, temperature: float, vocab_size: int, with_entropy: bool, wants_hidden: bool,
    wants_weight: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    grads = linear_logprobs_backward(
        hidden, weight, targets, lse, entropy if with_entropy else None, grad_logprobs.contiguous(),
        grad_entropy.contiguous() if with_entropy else None, temperature=temperature, vocab_start=0,
        vocab_size=vocab_size, wants=(wants_hidden, wants_weight),
    )  # fmt: skip
    grad_hidden, grad_weight = (
        grad if grad is not None else like.new_empty(0) for grad, like in zip(grads, (hidden, weight), strict=True)
    )
    return grad_hidden, grad_weight


@torch.library.register_fake("grpo_mc::linear_logprobs_backward")
def _fake_backward(
    hidden: Tensor, weight: Tensor, targets: Tensor, lse: Tensor, entropy: Tensor, grad_logprobs: Tensor,
    grad_entropy: Tensor, temperature: float, vocab_size: int, with_entropy: bool, wants_hidden: bool,
    wants_weight: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return (
        hidden.new_empty(hidden.shape if wants_hidden else 0),
        weight.new_empty(weight.shape if wants_weight else 0),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    hidden, weight, targets, ctx.temperature, ctx.vocab_size, ctx.with_entropy = inputs
    _, entropy, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(hidden, weight, targets, lse, entropy)


def _backward(
    ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor, grad_lse: Tensor | None
) -> tuple[Tensor | None, ...]:
    wants_hidden, wants_weight = ctx.needs_input_grad[:2]
    grad_hidden, grad_weight = torch.ops.grpo_mc.linear_logprobs_backward(
        *ctx.saved_tensors, grad_logprobs, grad_entropy, ctx.temperature, ctx.vocab_size, ctx.with_entropy,
        wants_hidden, wants_weight,
    )  # fmt: skip
    return grad_hidden if wants_hidden else None, grad_weight if wants_weight else None, None, None, None, None


torch.library.register_autograd("grpo_mc::linear_logprobs", _backward, setup_context=_setup_context)
