"""The algorithm: advantages, filtering, corrections, the loss and its denominators. Pure functions of torch and numpy.

Every term of the objective is defined in grpo_mc.ops.reference and computed by grpo_mc.ops; this package turns section
`algorithm` and the records into calls of them, and their sums into metrics.
"""

from __future__ import annotations

from grpo_mc.algorithms.advantages import AdvantageResult, compute_advantages
from grpo_mc.algorithms.correction import Correction, correct_mismatch
from grpo_mc.algorithms.denominators import Denominators, count_batch, count_denominators
from grpo_mc.algorithms.filtering import FilterDecision, RefillState, filter_groups
from grpo_mc.algorithms.kl import warn_about_kl
from grpo_mc.algorithms.loss import LossInputs, apply_correction, grpo_loss
from grpo_mc.algorithms.metrics import add_sums, batch_metrics, loss_metrics
from grpo_mc.algorithms.schedule import learning_rate

__all__ = [
    "AdvantageResult",
    "Correction",
    "Denominators",
    "FilterDecision",
    "LossInputs",
    "RefillState",
    "add_sums",
    "apply_correction",
    "batch_metrics",
    "compute_advantages",
    "correct_mismatch",
    "count_batch",
    "count_denominators",
    "filter_groups",
    "grpo_loss",
    "learning_rate",
    "loss_metrics",
    "warn_about_kl",
]
