"""The policy loss of packed tokens: surrogate, KL to the reference, entropy bonus, one aggregate.

    L_t = w_t * surrogate_t + beta * k_t - entropy_coef * H_t          loss = aggregate of L_t over loss_mask

with rho_t = exp(logprobs - old_logprobs) and, per sequence, s = exp(mean over loss_mask of logprobs - old_logprobs),
both with the exponent clamped to +-20 before exp (gradient 0 beyond):

    clip         -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A); with dual_clip c and A < 0: -max(that min, c A)
    gspo         clip with s in place of rho
    gspo_token   clip with s_t = sg(s) exp(logprob_t - sg(logprob_t)), sg = stop gradient
    cispo        -sg(clip(rho, 1 - clip_low, 1 + clip_high)) A logprob_t
    reinforce    -A logprob_t

A tie between the branches passes the full gradient; the gradient is 0 only where the clipped branch is strictly the
smaller one. Masked tokens are selected away before any arithmetic, so that a NaN there reaches neither the loss nor a
gradient.

Sources: GRPO arXiv 2402.03300, DAPO 2503.14476 (clip_high, token_mean), Dr. GRPO 2503.20783
(sequence_mean_token_sum_norm), GSPO 2507.18071, CISPO 2506.13585, dual clip 1912.09729; kl.py for k1-k3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_mc.ops.policy_loss import PolicyLoss
from grpo_mc.ops.reference.kl import EXPONENT_LIMIT, KL_ESTIMATORS, KL_GRADIENTS, kl_estimate, kl_term, token_ratio

KINDS = ("clip", "gspo", "gspo_token", "cispo", "reinforce")
AGGREGATIONS = (
    "token_mean",
    "sequence_mean_token_mean",
    "sequence_mean_token_sum",
    "sequence_mean_token_sum_norm",
    "group_mean",
)


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
        kl: estimator "k1", "k2", "k3"; None = no KL. With beta 0 it is measured only.
        kl_gradient: "direct", "k2" or "importance" (kl.py).
        beta: coefficient of the KL term.
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
        denominator: the GLOBAL count, over micro-batches and ranks; 0 gives loss 0 and gradients 0.

    Returns:
        PolicyLoss(loss, metrics).

    Raises:
        ValueError: unknown name, a term switched on without its input, shapes that do not fit.
    """
    per_token = {
        "old_logprobs": old_logprobs,
        "advantages": advantages,
        "loss_mask": loss_mask,
        "ref_logprobs": ref_logprobs,
        "entropy": entropy,
        "weights": weights,
    }
    _check_shapes(logprobs, per_token, cu_seqlens, sequence_groups)
    _check_names(kind, kl, kl_gradient, aggregation, cu_seqlens, sequence_groups, norm_length)
    _check_terms(kind, clip_low, clip_high, dual_clip, kl, beta, ref_logprobs, entropy, entropy_coef)
    mask = loss_mask.bool()

    def select(values: Tensor) -> Tensor:
        return torch.where(mask, values, torch.zeros_like(values))

    lp, old, adv = select(logprobs), select(old_logprobs.detach()), select(advantages.detach())
    ratio = _ratio(kind, lp, old, mask, cu_seqlens)
    policy_term, counts = _surrogate(kind, lp, ratio, adv, clip_low, clip_high, dual_clip)
    if weights is not None:
        policy_term = policy_term * select(weights.detach())
    token_loss = policy_term
    zero = torch.zeros_like(lp.detach())
    kl_values, entropy_values = zero, zero
    if kl is not None and ref_logprobs is not None:
        ref = select(ref_logprobs.detach())
        kl_values = kl_estimate(lp.detach(), ref, kl)
        if beta != 0.0:
            token_loss = token_loss + beta * kl_term(lp, old, ref, kl, kl_gradient)
    if entropy is not None:
        entropy_values = select(entropy)
        if entropy_coef != 0.0:
            token_loss = token_loss - entropy_coef * entropy_values
    loss = _aggregate(token_loss, mask, aggregation, cu_seqlens, sequence_groups, norm_length, denominator)
    sums = {
        "token_count": mask,
        "ratio_sum": ratio,
        **counts,
        "kl_sum": kl_values,
        "entropy_sum": entropy_values,
        "policy_loss_sum": policy_term,
    }
    return PolicyLoss(loss, {name: select(values.detach().double()).sum() for name, values in sums.items()})


def _ratio(kind: str, lp: Tensor, old: Tensor, mask: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """[T] the ratio that is clipped: rho, or the sequence's s at each of its tokens."""
    if kind not in ("gspo", "gspo_token"):
        return token_ratio(lp, old)
    assert cu_seqlens is not None
    sequence = sequence_of_token(cu_seqlens)  # [T]
    num_sequences = len(cu_seqlens) - 1
    count = _sum_by(mask.to(lp.dtype), sequence, num_sequences)
    mean = _sum_by(lp - old, sequence, num_sequences) / count.clamp(min=1)  # [N]
    s = mean.clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT).exp()[sequence]  # [T]
    return s if kind == "gspo" else s.detach() * (lp - lp.detach()).exp()


def _surrogate(
    kind: str, lp: Tensor, ratio: Tensor, adv: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """[T] surrogate loss, and where the clip bound it: [T] bool by metric name.

    For the min kinds a token counts when the clipped branch is strictly smaller (its gradient is 0); for cispo when
    its coefficient was clipped; for reinforce never.
    """
    clipped_ratio = ratio.detach().clamp(1 - clip_low, 1 + clip_high)
    below, above = ratio.detach() < clipped_ratio, ratio.detach() > clipped_ratio
    never = torch.zeros_like(below)
    if kind == "reinforce":
        return -adv * lp, {"clip_low_count": never, "clip_high_count": never, "dual_clip_count": never}
    if kind == "cispo":
        counts = {"clip_low_count": below, "clip_high_count": above, "dual_clip_count": never}
        return -clipped_ratio * adv * lp, counts
    free, clipped = ratio * adv, clipped_ratio * adv
    is_clipped = clipped < free.detach()
    smaller = torch.where(is_clipped, clipped, free)
    dual = never
    if dual_clip is not None:
        dual = (adv < 0) & (dual_clip * adv > smaller.detach())
        smaller = torch.where(dual, dual_clip * adv, smaller)
    return -smaller, {
        "clip_low_count": is_clipped & below,
        "clip_high_count": is_clipped & above,
        "dual_clip_count": dual,
    }


def _aggregate(
    token_loss: Tensor,
    mask: Tensor,
    aggregation: str,
    cu_seqlens: Tensor | None,
    sequence_groups: Tensor | None,
    norm_length: int | None,
    denominator: float | Tensor,
) -> Tensor:
    """0-dim loss; sums run in float64."""
    masked = torch.where(mask, token_loss, torch.zeros_like(token_loss)).double()
    if aggregation in ("sequence_mean_token_mean", "group_mean"):
        assert cu_seqlens is not None
        part = sequence_of_token(cu_seqlens)  # [T] sequence, or group, of each token
        num_parts = len(cu_seqlens) - 1
        if aggregation == "group_mean":
            assert sequence_groups is not None
            groups, group_of_sequence = torch.unique(sequence_groups, return_inverse=True)
            part, num_parts = group_of_sequence[part], len(groups)
        count = _sum_by(mask.double(), part, num_parts)
        total = (_sum_by(masked, part, num_parts) / count.clamp(min=1)).sum()
    else:
        total = masked.sum()
    if aggregation == "sequence_mean_token_sum_norm":
        assert norm_length is not None
        total = total / norm_length
    d = torch.as_tensor(denominator, dtype=torch.float64, device=token_loss.device)
    # An empty batch: 0 times a sum that is already 0, so that backward still runs and finds zeros.
    return (total * torch.where(d > 0, 1 / d, torch.zeros_like(d))).to(token_loss.dtype)


def sequence_of_token(cu_seqlens: Tensor) -> Tensor:
    """[T] int64 index of the sequence each token lies in; cu_seqlens is [N + 1] int64."""
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    return torch.repeat_interleave(torch.arange(len(lengths), device=cu_seqlens.device), lengths)


def _sum_by(values: Tensor, part: Tensor, num_parts: int) -> Tensor:
    """[num_parts] sums of values by part."""
    return torch.zeros(num_parts, dtype=values.dtype, device=values.device).index_add(0, part, values)


def _check_shapes(
    logprobs: Tensor, per_token: dict[str, Tensor | None], cu_seqlens: Tensor | None, sequence_groups: Tensor | None
) -> None:
    if logprobs.dim() != 1 or logprobs.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"policy_loss: logprobs are {list(logprobs.shape)} {logprobs.dtype}; need [T] float32 or float64"
        )
    for name, values in per_token.items():
        if values is not None and values.shape != logprobs.shape:
            raise ValueError(
                f"policy_loss: {name} is {list(values.shape)} but logprobs are {list(logprobs.shape)}; "
                f"pass one entry per packed token"
            )
    if cu_seqlens is None:
        return
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 1 or int(cu_seqlens[0]) != 0 or int(cu_seqlens[-1]) != len(logprobs):
        raise ValueError(
            f"policy_loss: cu_seqlens is {cu_seqlens.tolist()} for {len(logprobs)} tokens; "
            f"it must start with 0 and end with {len(logprobs)}"
        )
    if bool((cu_seqlens[1:] < cu_seqlens[:-1]).any()):
        raise ValueError(f"policy_loss: cu_seqlens is {cu_seqlens.tolist()}; it must not decrease")
    if sequence_groups is not None and sequence_groups.shape != (len(cu_seqlens) - 1,):
        raise ValueError(
            f"policy_loss: sequence_groups is {list(sequence_groups.shape)} but cu_seqlens holds "
            f"{len(cu_seqlens) - 1} sequences; pass one group id per sequence"
        )


def _check_names(
    kind: str,
    kl: str | None,
    kl_gradient: str,
    aggregation: str,
    cu_seqlens: Tensor | None,
    sequence_groups: Tensor | None,
    norm_length: int | None,
) -> None:
    choices = (("kind", kind, KINDS), ("aggregation", aggregation, AGGREGATIONS), ("kl", kl, (None, *KL_ESTIMATORS)))
    for name, value, allowed in (*choices, ("kl_gradient", kl_gradient, KL_GRADIENTS)):
        if value not in allowed:
            raise ValueError(f"policy_loss: {name} is {value!r}; use one of {', '.join(map(str, allowed))}")
    if cu_seqlens is None and (kind.startswith("gspo") or aggregation != "token_mean"):
        raise ValueError(f"policy_loss: kind {kind} with aggregation {aggregation} needs cu_seqlens [N + 1]; got None")
    if aggregation == "group_mean" and sequence_groups is None:
        raise ValueError("policy_loss: aggregation group_mean needs sequence_groups [N]; got None")
    if aggregation == "sequence_mean_token_sum_norm" and (norm_length is None or norm_length < 1):
        raise ValueError(
            f"policy_loss: aggregation sequence_mean_token_sum_norm needs norm_length >= 1 (the maximum response "
            f"length in tokens); got {norm_length}"
        )


def _check_terms(
    kind: str,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
    kl: str | None,
    beta: float,
    ref_logprobs: Tensor | None,
    entropy: Tensor | None,
    entropy_coef: float,
) -> None:
    if not (clip_low >= 0 and clip_high >= 0):
        raise ValueError(f"policy_loss: clip_low is {clip_low} and clip_high {clip_high}; both must be >= 0")
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"policy_loss: dual_clip is {dual_clip}; it must be > 1, or None for off")
    if dual_clip is not None and kind in ("cispo", "reinforce"):
        raise ValueError(
            f"policy_loss: dual_clip is {dual_clip} but kind is {kind!r}, which has no minimum to bound; "
            f"set dual_clip to None"
        )
    if (kl is None) != (ref_logprobs is None):
        given = "ref_logprobs" if kl is None else f"kl {kl!r}"
        raise ValueError(f"policy_loss: got {given} alone; give both kl and ref_logprobs, or neither")
    if beta != 0.0 and kl is None:
        raise ValueError(f"policy_loss: beta is {beta} but kl is None; name an estimator or set beta to 0")
    if entropy_coef != 0.0 and entropy is None:
        raise ValueError(f"policy_loss: entropy_coef is {entropy_coef} but entropy is None; pass entropy [T]")
