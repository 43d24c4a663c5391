"""The policy loss of packed tokens, fused: loss, metric sums and the gradient from one pass over the tokens.

    L_t = w_t * surrogate_t + beta * k_t - entropy_coef * H_t          loss = aggregate of L_t over loss_mask

with rho_t = exp(logprobs - old_logprobs) and, per sequence, s = exp(mean over loss_mask of logprobs - old_logprobs),
both with the exponent clamped to +-20 before exp (gradient 0 beyond):

    clip         -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A); with dual_clip c and A < 0: -max(that min, c A)
    gspo         clip with s in place of rho
    gspo_token   clip with s_t = sg(s) exp(logprob_t - sg(logprob_t)), sg = stop gradient
    cispo        -sg(clip(rho, 1 - clip_low, 1 + clip_high)) A logprob_t
    reinforce    -A logprob_t

A tie between the branches passes the full gradient (H11). Masked tokens are replaced by zeros before any arithmetic,
so a NaN there reaches nothing. The gradient is computed in the forward pass and scaled in the backward pass
(csrc/autograd/policy_loss.cpp). Token sums are float64 over parts of 128 tokens; results do not depend on the number
of threads, and on a GPU are the same on every run. Nothing waits for the GPU. Sources: see
grpo_mc.ops.reference.policy_loss.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_mc.ops.device import check_devices
from grpo_mc.ops.loader import load

load()

METRICS = (
    "token_count",
    "ratio_sum",
    "clip_low_count",
    "clip_high_count",
    "dual_clip_count",
    "kl_sum",
    "entropy_sum",
    "policy_loss_sum",
)
"""Every metric is a sum over the tokens of loss_mask, so that micro-batches and ranks add; the caller divides."""


class PolicyLoss(NamedTuple):
    """What policy_loss returns."""

    loss: Tensor
    """0-dim, dtype of logprobs, differentiable in logprobs and entropy."""
    metrics: dict[str, Tensor]
    """0-dim float64 tensors without gradient, one for each name in METRICS."""


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    kind: str,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    kl: str | None = None,
    kl_gradient: str = "direct",
    beta: float = 0.0,
    ref_logprobs: Tensor | None = None,
    entropy: Tensor | None = None,
    entropy_coef: float = 0.0,
    weights: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    sequence_groups: Tensor | None = None,
    aggregation: str,
    norm_length: int | None = None,
    denominator: float | Tensor,
) -> PolicyLoss:
    """Loss and metric sums of one micro-batch.

    Args:
        logprobs: [T] float32 or float64, current policy, with gradient.
        old_logprobs: [T], the policy the ratio is taken against; constant.
        advantages: [T], one per token; constant.
        loss_mask: [T] bool, tokens that enter the loss.
        kind: "clip", "gspo", "gspo_token", "cispo" or "reinforce"; the gspo kinds need cu_seqlens.
        clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high]; both >= 0.
        dual_clip: c > 1, bound on the loss of tokens with A < 0 (clip and gspo kinds; refused with the others);
            None = off.
        kl: estimator "k1", "k2", "k3" with d = ref_logprobs - logprobs (k3: d clamped to +-20); None = no KL. With
            beta 0 it is measured only.
        kl_gradient: "direct" differentiates the estimator as written; "k2" keeps its value and takes the gradient of
            k2; "importance" is rho * k with the gradient through rho.
        beta: coefficient of the KL term, finite.
        ref_logprobs: [T]; required exactly when kl is given.
        entropy: [T] full entropy of each row; measured when given, trained on when entropy_coef != 0.
        entropy_coef: coefficient of the entropy bonus.
        weights: [T] constants w_t on the surrogate (not on KL or entropy); None = 1.
        cu_seqlens: [N + 1] int64, sequence i is tokens cu_seqlens[i] : cu_seqlens[i + 1]; 0 first, T last. Required
            by the gspo kinds and by every aggregation but token_mean.
        sequence_groups: [N] int64 group of each sequence; required by "group_mean".
        aggregation: with D = denominator,
            token_mean: sum m L / D                                            (D = tokens in the loss)
            sequence_mean_token_mean: sum_i (sum_t m L / sum_t m) / D          (D = sequences)
            sequence_mean_token_sum: sum_i sum_t m L / D                       (D = sequences)
            sequence_mean_token_sum_norm: sum_i sum_t m L / (D * norm_length)  (D = sequences)
            group_mean: sum_g (sum of m L in g / sum of m in g) / D            (D = groups)
            A sequence (or group) whose mean is taken must lie wholly in this call; one without tokens adds 0.
        norm_length: tokens, >= 1; required by sequence_mean_token_sum_norm.
        denominator: the GLOBAL count, over micro-batches and ranks, finite and >= 0; 0 gives loss 0 and
            gradients 0. A number, or a tensor on the CPU or the device of the others.

    Returns:
        PolicyLoss(loss, metrics).

    Raises:
        ValueError: unknown name, a number that is not finite or out of range, a term switched on without its input,
            shapes that do not fit, tensors on several devices. Tensors on a GPU are not read back: there a denominator
            that is no count, and tokens outside the order of cu_seqlens, make the loss NaN.
    """
    check_devices(
        "policy_loss", logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, loss_mask=loss_mask,
        ref_logprobs=ref_logprobs, entropy=entropy, weights=weights, cu_seqlens=cu_seqlens,
        sequence_groups=sequence_groups,
    )  # fmt: skip
    divisor = torch.as_tensor(denominator, dtype=torch.float64)  # on its own device: a copy to another would wait
    loss, metrics, _, _ = torch.ops.grpo_mc.policy_loss(
        logprobs,
        old_logprobs,
        advantages,
        loss_mask,
        ref_logprobs,
        entropy,
        weights,
        cu_seqlens,
        sequence_groups,
        divisor,
        kind=kind,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
        kl=kl,
        kl_gradient=kl_gradient,
        beta=beta,
        entropy_coef=entropy_coef,
        aggregation=aggregation,
        norm_length=norm_length,
    )
    return PolicyLoss(loss, dict(zip(METRICS, metrics.unbind(), strict=True)))


@torch.library.register_fake("grpo_mc::policy_loss")
def _fake(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    ref_logprobs: Tensor | None,
    entropy: Tensor | None,
    *_: Any,
    entropy_coef: float,
    **__: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad_entropy = logprobs.new_empty(logprobs.numel() if entropy_coef != 0 else 0)
    metrics = logprobs.new_empty(len(METRICS), dtype=torch.float64)
    return (
        logprobs.new_empty(()),
        metrics,
        torch.empty_like(logprobs, memory_format=torch.contiguous_format),
        grad_entropy,
    )
