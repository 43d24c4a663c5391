"""Per-token estimates of KL(policy || reference), from one sampled token, and the gradients they are given.

With d = ref_logprob - logprob (John Schulman, "Approximating KL Divergence"):

    k1 = -d                   unbiased, may be negative
    k2 = d^2 / 2              biased, never negative; its gradient is unbiased on policy
    k3 = exp(d) - d - 1       unbiased, never negative; d clamped to +-EXPONENT_LIMIT *before* exp

The clamp makes k3 saturate, with gradient 0 beyond the limit (clamping after exp would leave 0 * inf = NaN in the
backward pass). NaN stays NaN. k1 and k2 have no exp and are not clamped.
"""

from __future__ import annotations

import torch
from torch import Tensor

EXPONENT_LIMIT = 20.0
"""Exponents are clamped to +-20 before exp: e^20 is 4.9e8, far outside any useful ratio and far inside float32."""

KL_ESTIMATORS = ("k1", "k2", "k3")
KL_GRADIENTS = ("direct", "k2", "importance")


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, kind: str) -> Tensor:
    """k1, k2 or k3 of each token, differentiable as written.

    Args:
        logprobs, ref_logprobs: same shape, float32 or float64.
        kind: "k1", "k2" or "k3".

    Returns:
        Same shape and dtype.

    Raises:
        ValueError: unknown kind.
    """
    d = ref_logprobs - logprobs
    if kind == "k1":
        return -d
    if kind == "k2":
        return d.square() / 2
    if kind == "k3":
        d = d.clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT)
        return d.exp() - d - 1
    raise ValueError(f"kl_estimate: kind is {kind!r}; use one of {', '.join(KL_ESTIMATORS)}")


def kl_term(logprobs: Tensor, old_logprobs: Tensor, ref_logprobs: Tensor, kind: str, gradient: str) -> Tensor:
    """The estimate with the gradient asked for.

    Args:
        logprobs, old_logprobs, ref_logprobs: same shape.
        kind: "k1", "k2" or "k3".
        gradient: "direct" differentiates the estimator as written (k1: expected gradient 0); "k2" keeps the value and
            takes the gradient of k2, on policy the exact gradient of the reverse KL; "importance" is rho * k with
            rho = exp(logprobs - old_logprobs), value and gradient of the product, exact in expectation off policy.

    Returns:
        Same shape and dtype.

    Raises:
        ValueError: unknown kind or gradient.
    """
    k = kl_estimate(logprobs, ref_logprobs, kind)
    if gradient == "direct":
        return k
    if gradient == "k2":
        k2 = kl_estimate(logprobs, ref_logprobs, "k2")
        # Not (k - k2).detach() + k2: that rounds k away where k2 is much larger than k.
        return k.detach() + (k2 - k2.detach())
    if gradient == "importance":
        return token_ratio(logprobs, old_logprobs) * k
    raise ValueError(f"kl_term: gradient is {gradient!r}; use one of {', '.join(KL_GRADIENTS)}")


def token_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """exp(logprobs - old_logprobs), the exponent clamped to +-EXPONENT_LIMIT (gradient 0 beyond it)."""
    return torch.exp((logprobs - old_logprobs).clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT))
