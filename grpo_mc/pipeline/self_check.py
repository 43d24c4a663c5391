"""The check of the first step: do the sampler and the trainer see the same policy?

Right after the start the trainer's log-probs of the sampled tokens equal the rollout log-probs up to rounding, and the
reference is the policy itself. If not, something between the two is wrong (temperature, positions, masks, weights that
were not published), and training would chase the difference.
"""

from __future__ import annotations

from collections.abc import Mapping

from grpo_mc.config import Config

LOGPROB_TOLERANCE = {"fp32": 1e-3, "bf16": 5e-2}
"""Largest mean |trainer - rollout| log-prob difference that rounding explains, by model.dtype."""
FP8_LOGPROB_TOLERANCE = 0.3
"""The same for a trainer in FP8 and a sampler that is not: 0.15 was measured for the 30 layers of SmolLM2-135M."""
KL_TOLERANCE = 1e-4


def check_first_step(metrics: Mapping[str, float], config: Config) -> list[str]:
    """Warnings about the first step's figures; empty when all is well.

    With several updates per batch the KL of the first step is not 0 and is not judged.
    """
    warnings = []
    difference = metrics.get("mismatch/logprob_abs_diff", 0.0)
    limit = LOGPROB_TOLERANCE[config.model.dtype] if config.model.fp8 == "none" else FP8_LOGPROB_TOLERANCE
    if not difference <= limit:
        warnings.append(
            f"step 1: trainer and rollout log-probs differ by {difference:.3g} on average, expected at most {limit:g};"
            " the sampler does not sample from the policy that is trained (run `grpo-mc check parity`)"
        )
    kl = metrics.get("policy/kl", 0.0)
    updates = config.algorithm.epochs * config.algorithm.minibatches
    if updates == 1 and not abs(kl) <= KL_TOLERANCE:
        warnings.append(
            f"step 1: KL to the reference is {kl:.3g}, expected 0 (at most {KL_TOLERANCE:g});"
            " the reference is not the policy that the run started from"
        )
    return warnings
