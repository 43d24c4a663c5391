"""Log-probability (and entropy) of each target token, fused: one pass over the logits, no [T, V] temporary.

    z = logits / temperature          logprob_t = z[t, target_t] - logsumexp(z[t])
    p = softmax(z)                    entropy_t = -sum_j p_j log p_j

Forward reads the logits once and keeps three numbers a row. Backward reads them again and writes the gradient

    grad_j = (g_t (1[j = target] - p_j) - h_t p_j (log p_j + entropy)) / temperature

where g and h are the gradients of the log-prob and of the entropy. Statistics are float32 over parts of 512 columns
and float64 across parts, whatever the dtype of the logits, so bfloat16 logits give float32 log-probs (H09). Terms
below exp(-87) of the largest count as 0. float64 logits are computed in float64. Results do not depend on the number
of threads. On a GPU a block of threads takes a row, and its sums are float32 over parts of 16 to 32 columns.
`grpo_mc.ops.reference` holds the plain twins; grpo_mc.megatron merges the shards of a split vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from grpo_mc.ops.device import check_devices
from grpo_mc.ops.loader import load

load()


def token_logprobs(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    with_entropy: bool = False,
    inplace_backward: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Log-probability of targets[t] under softmax(logits[t] / temperature), and the entropy of that distribution.

    Args:
        logits: [T, V] float32, bfloat16 or float64; rows may be strided. -inf is a token that cannot be drawn; a NaN,
            +inf or a row wholly -inf makes that row's results NaN.
        targets: [T] int64 in [0, vocab_size).
        temperature: 1e-38 to 1e38; the one the tokens were sampled with.
        vocab_size: columns that are real tokens; the ones after it are padding, count for nothing and get gradient 0
            (H19). None = V.
        with_entropy: also return the entropy of each row, differentiable.
        inplace_backward: the backward pass writes the gradient over the storage of `logits` and returns it, so that
            no second [T, V] is allocated. The logits are destroyed: nothing else may read them after backward, and a
            second backward through the same graph raises. Needs adjacent columns in memory.

    Returns:
        logprobs [T], or (logprobs [T], entropy [T]): float64 for float64 logits, else float32. A token whose
        gradients are both exactly 0 (masked) gets gradient 0 whatever its logits hold.

    Raises:
        ValueError: shapes, dtypes, temperature, vocab_size or a target out of range; tensors on two devices. Targets
            on a GPU are not read back: there one out of range makes its row's results NaN.
    """
    check_devices("token_logprobs", logits=logits, targets=targets)
    columns = logits.shape[-1] if logits.dim() else 0  # the operator refuses what is not [T, V]
    size = columns if vocab_size is None else vocab_size
    logprobs, entropy, _ = torch.ops.grpo_mc.token_logprobs(
        logits, targets, temperature, size, with_entropy, inplace_backward
    )
    return (logprobs, entropy) if with_entropy else logprobs


def token_logprob_stats(
    logits: Tensor, targets: Tensor, *, vocab_start: int, vocab_size: int, temperature: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One vocabulary shard's part of the log-probs and entropies; no gradient. The merge is in the reference module.

    Args:
        logits: [T, V'] this shard's columns; column j is token vocab_start + j. float32, bfloat16 or float64.
        targets: [T] int64 token ids of the whole vocabulary.
        vocab_start: token id of column 0.
        vocab_size: real tokens in the whole vocabulary; columns with vocab_start + j >= vocab_size never count.
        temperature: > 0.

    Returns:
        (max, sumexp, sum_p_logit, target_logit), each [T], float64 for float64 logits and float32 otherwise, with
        z = logits / temperature: max of z, -inf for a shard without a real column; sumexp = sum exp(z - max);
        sum_p_logit = sum exp(z - max) (z - max); target_logit = z at the target, 0 when another shard holds it.

    Raises:
        ValueError: shapes, dtypes, temperature, or a target outside [0, vocab_size); on a GPU its target_logit is NaN.
    """
    check_devices("token_logprob_stats", logits=logits, targets=targets)
    stats = torch.ops.grpo_mc.token_logprob_stats(logits.detach(), targets, vocab_start, vocab_size, temperature)
    return tuple(stats)


def token_logprobs_backward(
    logits: Tensor,
    targets: Tensor,
    lse: Tensor,
    entropy: Tensor | None,
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None,
    *,
    temperature: float,
    vocab_start: int,
    vocab_size: int,
    inplace: bool,
) -> Tensor:
    """Gradient of a loss with respect to one vocabulary shard's logits.

    Args:
        logits: [T, V'] this shard's columns, as given to token_logprob_stats.
        targets: [T] int64 token ids of the whole vocabulary.
        lse: [T] logsumexp of logits / temperature over the whole vocabulary. Pass float64 where logits may be in the
            thousands: float32 would round it.
        entropy: [T] of the whole vocabulary; None exactly when grad_entropy is None.
        grad_logprobs: [T].
        grad_entropy: [T] or None.
        temperature, vocab_start, vocab_size: as in token_logprob_stats.
        inplace: write the gradient over logits and return that tensor.

    Returns:
        [T, V'] in the dtype of logits; 0 in padding columns.

    Raises:
        ValueError: as token_logprob_stats; only one of entropy and grad_entropy given.
    """
    if (entropy is None) != (grad_entropy is None):
        raise ValueError("token_logprobs_backward: give both entropy and grad_entropy, or neither")
    check_devices(
        "token_logprobs_backward", logits=logits, targets=targets, lse=lse, entropy=entropy,
        grad_logprobs=grad_logprobs, grad_entropy=grad_entropy,
    )  # fmt: skip
    tensors = (targets, lse, entropy, grad_logprobs, grad_entropy)
    logits = logits.detach()
    if not inplace:
        return torch.ops.grpo_mc.token_logprobs_backward(logits, *tensors, temperature, vocab_start, vocab_size)
    torch.ops.grpo_mc.token_logprobs_backward_(logits, *tensors, temperature, vocab_start, vocab_size)
    torch.autograd.graph.increment_version(logits)  # so that a later use of the saved logits raises
    return logits


def _out_dtype(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _check_matrix(op: str, logits: Tensor) -> None:
    if logits.dim() != 2:
        raise ValueError(f"{op}: logits has shape {list(logits.shape)}; it must be [T, V]")


@torch.library.register_fake("grpo_mc::token_logprobs")
def _fake_forward(
    logits: Tensor, targets: Tensor, temperature: float, vocab_size: int, with_entropy: bool, inplace_backward: bool
) -> tuple[Tensor, Tensor, Tensor]:
    _check_matrix("token_logprobs", logits)
    tokens, dtype = logits.shape[0], _out_dtype(logits)
    entropy = logits.new_empty(tokens if with_entropy else 0, dtype=dtype)
    return logits.new_empty(tokens, dtype=dtype), entropy, logits.new_empty(tokens, dtype=torch.float64)


@torch.library.register_fake("grpo_mc::token_logprob_stats")
def _fake_stats(
    logits: Tensor, targets: Tensor, vocab_start: int, vocab_size: int, temperature: float
) -> tuple[Tensor, ...]:
    _check_matrix("token_logprob_stats", logits)
    return tuple(logits.new_empty(logits.shape[0], dtype=_out_dtype(logits)) for _ in range(4))


@torch.library.register_fake("grpo_mc::token_logprobs_backward")
def _fake_backward(logits: Tensor, *_: Any) -> Tensor:
    return logits.new_empty(logits.shape)


@torch.library.register_fake("grpo_mc::token_logprobs_backward_")
def _fake_backward_inplace(logits: Tensor, *_: Any) -> None:
    return None


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    logits, targets, ctx.temperature, ctx.vocab_size, ctx.with_entropy, ctx.inplace = inputs
    _, entropy, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(logits, targets, lse, entropy)


def _backward(
    ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor, grad_lse: Tensor | None
) -> tuple[Tensor | None, ...]:
    logits, targets, lse, entropy = ctx.saved_tensors
    if not ctx.needs_input_grad[0]:
        return (None,) * 6
    grad = token_logprobs_backward(
        logits,
        targets,
        lse,
        entropy if ctx.with_entropy else None,
        grad_logprobs,
        grad_entropy if ctx.with_entropy else None,
        temperature=ctx.temperature,
        vocab_start=0,
        vocab_size=ctx.vocab_size,
        inplace=ctx.inplace,
    )
    return grad, None, None, None, None, None


torch.library.register_autograd("grpo_mc::token_logprobs", _backward, setup_context=_setup_context)
