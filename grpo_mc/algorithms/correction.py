"""Rollout/trainer mismatch: the engine that sampled a token and the trainer that scores it disagree a little.

With w_t = exp(old_t - roll_t), the exponent clamped to +-20, and w_s the same for a sequence (the product of its
tokens' ratios, or their geometric mean):

    tis            weight min(w_t, high)                         truncated importance sampling
    tis_sequence   weight min(w_s, high) on each of its tokens
    mask_token     the token leaves the loss when w_t is outside [low, high]
    mask_sequence  the sequence leaves the loss when w_s is outside [low, high]

Masked tokens leave the denominators too, so the correction comes before they are counted. Weights are constants.
The mismatch is always measured: mean |old - roll|, the k3 of it, and the effective sample size of the weights,
(sum w)^2 / (T sum w^2), 1 when the two agree.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_mc.ops.reference.kl import EXPONENT_LIMIT, kl_estimate, token_ratio
from grpo_mc.ops.reference.policy_loss import sequence_of_token

CORRECTIONS = ("none", "tis", "mask_token", "mask_sequence", "tis_sequence")
SEQUENCE_RATIOS = ("product", "geometric_mean")
MISMATCH_METRICS = (
    "mismatch_token_count",
    "mismatch_abs_sum",
    "mismatch_k3_sum",
    "mismatch_weight_sum",
    "mismatch_weight_sq_sum",
    "mismatch_masked_count",
)
"""Sums over the loss mask as it was before the correction; they add over micro-batches and ranks."""


@dataclass(frozen=True)
class Correction:
    """What the correction does to T tokens."""

    weights: Tensor | None
    """[T] constants for policy_loss; None = all 1."""
    loss_mask: Tensor
    """[T] bool, a subset of the mask given."""
    metrics: dict[str, Tensor]
    """0-dim float64, one for each name in MISMATCH_METRICS."""


def correct_mismatch(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    *,
    kind: str,
    low: float,
    high: float,
    sequence_ratio: str = "product",
) -> Correction:
    """Weights or masks against the mismatch, and its measures.

    Args:
        old_logprobs: [T] float32 of the trainer.
        rollout_logprobs: [T] float32 of the engine, for the same policy version and temperature.
        loss_mask: [T] bool.
        cu_seqlens: [N + 1] int64; a sequence kind needs each sequence wholly in this call.
        kind: "none", "tis", "mask_token", "mask_sequence" or "tis_sequence".
        low: lower bound of the masks.
        high: cap of the weights, upper bound of the masks.
        sequence_ratio: "product" (the ratio of the sequence's probabilities) or "geometric_mean" (the same for every
            length; its bounds lie much nearer 1).

    Returns:
        Correction. Sequence weights come from tokens of loss_mask only.

    Raises:
        ValueError: unknown kind or sequence_ratio, bounds out of order, shapes that differ.
    """
    _check(old_logprobs, rollout_logprobs, loss_mask, kind, low, high, sequence_ratio)
    mask = loss_mask.bool()
    zero = torch.zeros_like(old_logprobs)
    old = torch.where(mask, old_logprobs.detach(), zero)
    roll = torch.where(mask, rollout_logprobs.detach(), zero)
    token_w = token_ratio(old, roll)  # [T]
    weights, kept = None, mask
    if kind in ("tis", "mask_token"):
        weights, kept = _apply(token_w, mask, kind == "tis", low, high)
    elif kind in ("tis_sequence", "mask_sequence"):
        sequence_w = _sequence_ratio(old - roll, mask, cu_seqlens, sequence_ratio)
        weights, kept = _apply(sequence_w, mask, kind == "tis_sequence", low, high)
    sums = {
        "mismatch_token_count": mask,
        "mismatch_abs_sum": (old - roll).abs(),
        # The mismatch is the KL from the engine's policy: samples come from roll, so d = old - roll.
        "mismatch_k3_sum": kl_estimate(roll, old, "k3"),
        "mismatch_weight_sum": token_w,
        "mismatch_weight_sq_sum": token_w.double().square(),
        "mismatch_masked_count": ~kept,
    }
    metrics = {name: torch.where(mask, v.double(), v.new_zeros(()).double()).sum() for name, v in sums.items()}
    return Correction(weights, kept, metrics)


def _apply(ratio: Tensor, mask: Tensor, is_weight: bool, low: float, high: float) -> tuple[Tensor | None, Tensor]:
    """Weights and unchanged mask, or no weights and a smaller mask. A NaN ratio is outside every range."""
    if is_weight:
        return ratio.clamp(max=high), mask
    return None, mask & (ratio >= low) & (ratio <= high)


def _sequence_ratio(log_ratio: Tensor, mask: Tensor, cu_seqlens: Tensor, kind: str) -> Tensor:
    """[T] w_s at each token of its sequence; log_ratio is 0 on masked tokens."""
    sequence = sequence_of_token(cu_seqlens)
    num_sequences = len(cu_seqlens) - 1
    total = log_ratio.new_zeros(num_sequences).index_add(0, sequence, log_ratio)
    if kind == "geometric_mean":
        count = log_ratio.new_zeros(num_sequences).index_add(0, sequence, mask.to(log_ratio.dtype))
        total = total / count.clamp(min=1)
    return total.clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT).exp()[sequence]


def _check(old: Tensor, roll: Tensor, mask: Tensor, kind: str, low: float, high: float, sequence_ratio: str) -> None:
    if not old.shape == roll.shape == mask.shape or old.dim() != 1:
        raise ValueError(
            f"correct_mismatch: old_logprobs are {list(old.shape)}, rollout_logprobs {list(roll.shape)} and loss_mask "
            f"{list(mask.shape)}; all must be the same [T]"
        )
    if kind not in CORRECTIONS:
        raise ValueError(f"correct_mismatch: kind is {kind!r}; use one of {', '.join(CORRECTIONS)}")
    if sequence_ratio not in SEQUENCE_RATIOS:
        raise ValueError(
            f"correct_mismatch: sequence_ratio is {sequence_ratio!r}; use one of {', '.join(SEQUENCE_RATIOS)}"
        )
    if kind != "none" and not 0 <= low < high:
        raise ValueError(f"correct_mismatch: low is {low} and high {high}; need 0 <= low < high")
