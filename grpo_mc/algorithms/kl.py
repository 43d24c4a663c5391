"""KL divergence to the reference policy: the per-token estimators, their gradients, and the KL of a whole rollout.

`kl_estimate` and `kl_term` are the definitions that the reference of the policy loss uses (grpo_mc.ops.reference.kl);
they are exported here for programs that build their own loss. `reward_kl` is the other placement: subtracted from the
reward of a rollout before advantages, r_i <- r_i - beta * sum_t m_t k1_t.
"""

from __future__ import annotations

import warnings

import numpy as np
import numpy.typing as npt

from grpo_mc.config import AlgorithmConfig
from grpo_mc.ops.reference.kl import EXPONENT_LIMIT, KL_ESTIMATORS, KL_GRADIENTS, kl_estimate, kl_term, token_ratio

__all__ = [
    "EXPONENT_LIMIT",
    "KL_ESTIMATORS",
    "KL_GRADIENTS",
    "kl_estimate",
    "kl_term",
    "reward_kl",
    "token_ratio",
    "warn_about_kl",
]


def reward_kl(
    logprobs: npt.NDArray[np.float32], ref_logprobs: npt.NDArray[np.float32], response_mask: npt.NDArray[np.bool_]
) -> float:
    """sum over the sampled tokens of k1 = logprob - ref_logprob, in float64.

    Args:
        logprobs: [R] under the policy that sampled.
        ref_logprobs: [R] under the reference policy.
        response_mask: [R] bool, true on sampled tokens; tokens of a tool carry no KL.

    Returns:
        The estimate of the KL divergence of one rollout; may be negative.

    Raises:
        ValueError: lengths that differ.
    """
    if not len(logprobs) == len(ref_logprobs) == len(response_mask):
        raise ValueError(
            f"reward_kl: got {len(logprobs)} logprobs, {len(ref_logprobs)} ref_logprobs and a mask of "
            f"{len(response_mask)}; all must have one entry per response token"
        )
    k1 = logprobs.astype(np.float64) - ref_logprobs.astype(np.float64)
    return float(k1[response_mask].sum())


def warn_about_kl(algorithm: AlgorithmConfig) -> None:
    """Warns about a KL setting that trains on noise; call it once per run.

    k1 differentiated as written is grad logprob, whose expectation is 0 on policy: the term costs a reference pass and
    pulls towards nothing.
    """
    if (
        algorithm.beta > 0
        and algorithm.kl == "k1"
        and algorithm.kl_placement == "in_loss"
        and algorithm.kl_gradient == "direct"
    ):
        warnings.warn(
            "algorithm.kl=k1 with kl_placement=in_loss and kl_gradient=direct has zero expected gradient; "
            "set algorithm.kl_gradient=k2, or algorithm.kl=k3, or algorithm.kl_placement=in_reward",
            stacklevel=2,
        )
