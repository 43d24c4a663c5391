"""Log-probability of each target token under its row of logits, and the full entropy of the row.

    z = logits / temperature          logprob_t = z[t, target_t] - logsumexp(z[t])
    p = softmax(z)                    entropy_t = -sum_j p_j log p_j = logsumexp(z[t]) - sum_j p_j z_j

Row t scores the token that follows it: the caller pairs logits row t with token t + 1 and leaves the last row out
(the operator sees rows and targets only). Columns at or past `vocab_size` are padding of a vocabulary that was
rounded up to split over ranks; they never enter the sums and get gradient 0.

`token_logprob_stats` and `token_logprobs_backward` are the two halves for one shard of a vocabulary that is split over
ranks. Shards s with (max_s, sumexp_s, sum_p_logit_s, target_logit_s) merge as

    M = max_s max_s           c_s = exp(max_s - M), and c_s = 0 with the whole term left out where max_s = -inf
    S = sum_s c_s sumexp_s    lse = M + log S     logprob = sum_s target_logit_s - lse
    U = sum_s c_s (sum_p_logit_s + (max_s - M) sumexp_s)                    entropy = log S - U / S
"""

from __future__ import annotations

import torch
from torch import Tensor


def token_logprobs(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    with_entropy: bool = False,
    inplace_backward: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Log-probability of targets[t] under softmax(logits[t] / temperature).

    Args:
        logits: [T, V] float64, float32, bfloat16 or float16.
        targets: [T] int64 in [0, vocab_size).
        temperature: > 0; the one the tokens were sampled with.
        vocab_size: columns that are real tokens; None = V.
        with_entropy: also return the entropy of each row, differentiable.
        inplace_backward: the operator may write the gradient over the logits; the numbers are the same, so there is
            nothing for this twin to do.

    Returns:
        logprobs [T] (and entropy [T]), float64 for float64 logits and float32 for every other dtype.

    Raises:
        ValueError: temperature <= 0, vocab_size outside [1, V], shapes that do not fit, a target out of range.
    """
    size = logits.shape[-1] if vocab_size is None else vocab_size
    _check("token_logprobs", logits, targets, temperature)
    if not 1 <= size <= logits.shape[1]:
        raise ValueError(
            f"token_logprobs: vocab_size is {size} but logits have {logits.shape[1]} columns; "
            f"it must be in [1, {logits.shape[1]}]"
        )
    if targets.numel() and not (0 <= int(targets.min()) and int(targets.max()) < size):
        raise ValueError(
            f"token_logprobs: targets span [{int(targets.min())}, {int(targets.max())}]; "
            f"every target must be in [0, {size}); mask positions that have none after the call"
        )
    log_p = torch.log_softmax(_scaled(logits[:, :size], temperature), dim=-1)  # [T, vocab_size]
    logprobs = log_p.gather(1, targets[:, None]).squeeze(1)  # [T]
    if not with_entropy:
        return logprobs
    p = log_p.exp()
    # A logit of -inf has p = 0 and log p = -inf: its share of the entropy is 0, and so is its gradient.
    entropy = -(p * log_p.masked_fill(p == 0, 0.0)).sum(-1)  # [T]
    return logprobs, entropy


def token_logprob_stats(
    logits: Tensor, targets: Tensor, *, vocab_start: int, vocab_size: int, temperature: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One vocabulary shard's part of the log-probs and entropies; no gradient.

    Args:
        logits: [T, V'] this shard's columns; column j is token vocab_start + j.
        targets: [T] int64 token ids of the whole vocabulary.
        vocab_start: token id of column 0.
        vocab_size: real tokens in the whole vocabulary; columns with vocab_start + j >= vocab_size never count.
        temperature: > 0.

    Returns:
        Four tensors [T], float64 for float64 logits and float32 otherwise, with z = logits / temperature:
        max of z, -inf for a shard without a real column; sumexp = sum exp(z - max); sum_p_logit =
        sum exp(z - max) (z - max); target_logit = z at the target, 0 when another shard holds it.

    Raises:
        ValueError: temperature <= 0, negative vocab_start, vocab_size < 1, shapes that do not fit.
    """
    _check("token_logprob_stats", logits, targets, temperature)
    real = _real_columns("token_logprob_stats", logits, vocab_start, vocab_size)
    z = _scaled(logits[:, :real].detach(), temperature)  # [T, real]
    local = targets - vocab_start  # [T]
    held = (local >= 0) & (local < real)
    if real == 0:
        zero = z.new_zeros(len(targets))
        return zero - float("inf"), zero, zero.clone(), zero.clone()
    maximum = z.max(-1).values
    shifted = z - maximum[:, None]
    weight = shifted.exp()
    sum_p_logit = (weight * shifted.masked_fill(weight == 0, 0.0)).sum(-1)
    picked = z.gather(1, local.clamp(0, real - 1)[:, None]).squeeze(1)
    return maximum, weight.sum(-1), sum_p_logit, torch.where(held, picked, torch.zeros_like(picked))


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

        grad_j = (grad_logprob (1[j = target] - p_j) - grad_entropy p_j (log p_j + entropy)) / temperature

    Args:
        logits: [T, V'] this shard's columns, as given to token_logprob_stats.
        targets: [T] int64 token ids of the whole vocabulary.
        lse: [T] logsumexp of logits / temperature over the whole vocabulary.
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
    _check("token_logprobs_backward", logits, targets, temperature)
    real = _real_columns("token_logprobs_backward", logits, vocab_start, vocab_size)
    if (entropy is None) != (grad_entropy is None):
        raise ValueError("token_logprobs_backward: give both entropy and grad_entropy, or neither")
    log_p = _scaled(logits[:, :real].detach(), temperature) - lse[:, None]  # [T, real]
    p = log_p.exp()
    columns = torch.arange(real, device=logits.device) + vocab_start
    is_target = (columns[None, :] == targets[:, None]).to(p.dtype)
    grad = grad_logprobs[:, None] * (is_target - p)
    if entropy is not None and grad_entropy is not None:
        grad = grad - grad_entropy[:, None] * p * (log_p.masked_fill(p == 0, 0.0) + entropy[:, None])
    out = logits.detach() if inplace else torch.empty_like(logits)
    out[:, :real] = (grad / temperature).to(logits.dtype)
    out[:, real:] = 0
    return out


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """logits / temperature in float32 (float64 stays): bf16 has 8 bits, too few for a log-prob (H09)."""
    return (logits if logits.dtype == torch.float64 else logits.float()) / temperature


def _real_columns(operation: str, logits: Tensor, vocab_start: int, vocab_size: int) -> int:
    if vocab_start < 0 or vocab_size < 1:
        raise ValueError(
            f"{operation}: vocab_start is {vocab_start} and vocab_size {vocab_size}; need vocab_start >= 0 (token id "
            f"of column 0) and vocab_size >= 1 (real tokens of the whole vocabulary)"
        )
    return max(0, min(logits.shape[1], vocab_size - vocab_start))


def _check(operation: str, logits: Tensor, targets: Tensor, temperature: float) -> None:
    if logits.dim() != 2 or targets.shape != logits.shape[:1]:
        raise ValueError(
            f"{operation}: logits are {list(logits.shape)} and targets {list(targets.shape)}; need [T, V] and [T]"
        )
    if not temperature > 0:
        raise ValueError(
            f"{operation}: temperature is {temperature}; it must be > 0 (greedy sampling has no log-prob to train on)"
        )
