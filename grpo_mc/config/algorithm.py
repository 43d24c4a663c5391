"""Section `algorithm`: the objective. The defaults are GRPO without a KL term; a preset fills what is not set.

`objective_formula` writes the resolved objective out. Sources: GRPO arXiv 2402.03300, Dr. GRPO 2503.20783, DAPO
2503.14476, GSPO 2507.18071, CISPO 2506.13585, dual clip 1912.09729, RLOO 2402.14740, REINFORCE++ 2501.03262, k1 to k3:
Schulman's note on approximating KL.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from grpo_mc.config.base import Section

Baseline = Literal["mean", "leave_one_out"]
Scale = Literal["std", "leave_one_out_std", "batch_std", "none"]
Loss = Literal["clip", "gspo", "gspo_token", "cispo", "reinforce"]
Aggregation = Literal[
    "token_mean",
    "sequence_mean_token_mean",
    "sequence_mean_token_sum",
    "sequence_mean_token_sum_norm",
    "group_mean",
]
KlEstimator = Literal["k1", "k2", "k3"]
KlPlacement = Literal["in_loss", "in_reward"]
KlGradient = Literal["direct", "k2", "importance"]
Correction = Literal["none", "tis", "mask_token", "mask_sequence", "tis_sequence"]


class AlgorithmConfig(Section):
    """The objective that is optimised."""

    preset: str | None = None
    """Name of a preset that fills every field not set here; null = the defaults of this section."""
    baseline: Baseline = "mean"
    """What is subtracted from a reward: the group's mean, or the mean of the group's others."""
    scale: Scale = "std"
    """What the difference is divided by: the group's std, the std of the group's others, the batch's std, nothing."""
    ddof: Literal[0, 1] = 0
    """The std divides by n - ddof."""
    eps: float = Field(default=1e-4, ge=0)
    """Added to the std before dividing."""
    quantile: float | None = Field(default=None, gt=0, lt=0.5)
    """Clip rewards to the group's [q, 1 - q] quantile range and scale by its width first; null = off."""
    loss: Loss = "clip"
    """The token loss."""
    clip_low: float = Field(default=0.2, ge=0, le=1)
    """The ratio's lower bound is 1 - clip_low; 1 = no lower bound."""
    clip_high: float = Field(default=0.2, ge=0)
    """The ratio's upper bound is 1 + clip_high."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Bound on the loss of a negative advantage, as a multiple of it; null = off; for clip and the gspo losses."""
    aggregation: Aggregation = "sequence_mean_token_mean"
    """How token losses become one number."""
    norm_length: int | None = Field(default=None, ge=1)
    """Constant that sequence_mean_token_sum_norm divides by, in tokens; null = rollout.max_new_tokens."""
    beta: float = Field(default=0.0, ge=0)
    """Coefficient of the KL divergence to the reference model; 0 = off, no reference model is kept."""
    kl: KlEstimator = "k3"
    """The estimator of the KL divergence."""
    kl_placement: KlPlacement = "in_loss"
    """Added to the loss of every token, or subtracted from the reward of the rollout."""
    kl_gradient: KlGradient = "direct"
    """How the estimator is differentiated in the loss: as written; with k2's gradient (on policy the exact gradient of
    the reverse KL); weighted by the ratio, with the gradient through it (off policy)."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Coefficient of the entropy bonus."""
    filter_zero_variance: bool = False
    """Drop groups whose rewards are all equal."""
    max_refills: int = Field(default=0, ge=0)
    """Most extra rounds of sampling in a step that replace dropped groups; 0 = none."""
    overlong_buffer: int | None = Field(default=None, ge=1)
    """Tokens before max_new_tokens over which a penalty grows from 0 to overlong_penalty; null = no penalty."""
    overlong_penalty: float = Field(default=1.0, ge=0)
    """Subtracted from the reward of a response of max_new_tokens tokens."""
    mask_truncated: bool = False
    """Leave truncated responses out of the loss."""
    correction: Correction = "none"
    """Correction for differences between the sampling engine and the trainer, by exp(old - rollout log-probs): weight
    every token (tis) or sequence (tis_sequence), capped; or drop tokens or sequences outside the bounds."""
    correction_low: float = Field(default=0.0, ge=0)
    """Lower bound of mask_token and mask_sequence."""
    correction_high: float = Field(default=2.0, gt=0)
    """Cap of tis and tis_sequence, upper bound of mask_token and mask_sequence."""
    epochs: int = Field(default=1, ge=1)
    """Passes over a training batch."""
    minibatches: int = Field(default=1, ge=1)
    """Optimizer steps in one pass over a training batch."""

    @model_validator(mode="after")
    def _correction_bounds_are_ordered(self) -> AlgorithmConfig:
        if self.correction_low >= self.correction_high:
            raise ValueError(
                f"correction_low is {self.correction_low} but correction_high is {self.correction_high}; "
                "correction_low must be the smaller one"
            )
        return self
