"""The loss of one micro-batch, as the trainer calls it: section `algorithm` turned into one call of policy_loss.

A training batch goes through three steps:

    inputs = [apply_correction(part, algorithm) for part in inputs]        mismatch: weights or smaller loss masks
    denominators = count over all inputs and all ranks                     after the masks, before the first forward
    loss, metrics = grpo_loss(logprobs, entropy, part, algorithm, denominators)      for each micro-batch

The sum of the losses (and of the gradients) over micro-batches and ranks is the loss of the batch: no further division.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from grpo_mc.algorithms.correction import Correction, correct_mismatch
from grpo_mc.algorithms.denominators import Denominators
from grpo_mc.config import AlgorithmConfig
from grpo_mc.ops import PolicyLoss, policy_loss

WEIGHT_CORRECTIONS = ("tis", "tis_sequence")


@dataclass(frozen=True)
class LossInputs:
    """The constants of one micro-batch: T scored response tokens of N sequences, packed.

    Sequences that are not in the loss (invalid, dropped, truncated and masked) may be there with loss_mask false.
    """

    old_logprobs: Tensor | None
    """[T] float32, the policy the ratio is taken against. None = the current policy itself, gradients stopped: exact
    when every batch gets one optimizer step, and saves the pass that would compute them."""
    rollout_logprobs: Tensor
    """[T] float32, as reported by the engine that sampled."""
    advantages: Tensor
    """[T] float32, the rollout's advantage at each of its tokens."""
    loss_mask: Tensor
    """[T] bool."""
    cu_seqlens: Tensor
    """[N + 1] int64, sequence i is tokens cu_seqlens[i] : cu_seqlens[i + 1]."""
    sequence_groups: Tensor
    """[N] int64 group of each sequence."""
    ref_logprobs: Tensor | None = None
    """[T] float32 under the reference policy; required when algorithm.beta > 0 with the KL in the loss."""
    correction: Correction | None = None
    """Set by apply_correction."""


def apply_correction(inputs: LossInputs, algorithm: AlgorithmConfig) -> LossInputs:
    """The inputs with the mismatch correction applied; loss_mask may shrink.

    With old_logprobs None the old policy is not known yet: weights are then made inside grpo_loss and the inputs come
    back unchanged.

    Raises:
        ValueError: a mask correction without old_logprobs (the mask changes the denominators, which are counted
            before the first forward pass).
    """
    if inputs.old_logprobs is None:
        if algorithm.correction not in ("none", *WEIGHT_CORRECTIONS):
            raise ValueError(
                f"apply_correction: algorithm.correction is {algorithm.correction!r} but old_logprobs is None; "
                f"compute old_logprobs before the step, or use one of none, {', '.join(WEIGHT_CORRECTIONS)}"
            )
        return inputs
    correction = _correct(inputs.old_logprobs, inputs, algorithm)
    return replace(inputs, loss_mask=correction.loss_mask, correction=correction)


def grpo_loss(
    logprobs: Tensor,
    entropy: Tensor | None,
    batch: LossInputs,
    algorithm: AlgorithmConfig,
    denominators: Denominators,
) -> PolicyLoss:
    """Loss and metric sums of one micro-batch.

    Args:
        logprobs: [T] float32, current policy, with gradient.
        entropy: [T] float32; required when algorithm.entropy_coef > 0, measured when given.
        batch: the micro-batch's constants, after apply_correction.
        algorithm: resolved section `algorithm`.
        denominators: counts over the whole batch of this optimizer step, all ranks.

    Returns:
        PolicyLoss; metrics are those of policy_loss and of the mismatch, all sums. kl_sum and entropy_sum are left
        out when there was nothing to measure.

    Raises:
        ValueError: as policy_loss; a correction is configured but apply_correction was not called.
    """
    old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
    correction = batch.correction
    if correction is None:
        if batch.old_logprobs is not None and algorithm.correction != "none":
            raise ValueError(
                f"grpo_loss: algorithm.correction is {algorithm.correction!r} but the inputs were not corrected; "
                f"call apply_correction on every micro-batch before counting the denominators"
            )
        correction = _correct(old, batch, algorithm)
    has_kl = batch.ref_logprobs is not None
    in_loss = algorithm.beta > 0 and algorithm.kl_placement == "in_loss"
    if in_loss and not has_kl:
        raise ValueError(
            f"grpo_loss: algorithm.beta is {algorithm.beta} with kl_placement in_loss but ref_logprobs is None; "
            f"run the reference pass before the step, or set algorithm.beta=0"
        )
    result = policy_loss(
        logprobs,
        old,
        batch.advantages,
        batch.loss_mask,
        kind=algorithm.loss,
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        dual_clip=algorithm.dual_clip,
        kl=algorithm.kl if has_kl else None,
        kl_gradient=algorithm.kl_gradient,
        beta=algorithm.beta if in_loss else 0.0,
        ref_logprobs=batch.ref_logprobs,
        entropy=entropy,
        entropy_coef=algorithm.entropy_coef,
        weights=correction.weights,
        cu_seqlens=batch.cu_seqlens,
        sequence_groups=batch.sequence_groups,
        aggregation=algorithm.aggregation,
        norm_length=algorithm.norm_length,
        denominator=float(denominators.for_aggregation(algorithm.aggregation)),
    )
    unmeasured = {name for name, given in (("kl_sum", has_kl), ("entropy_sum", entropy is not None)) if not given}
    metrics = {name: value for name, value in result.metrics.items() if name not in unmeasured}
    return PolicyLoss(result.loss, {**metrics, **correction.metrics})


def _correct(old: Tensor, batch: LossInputs, algorithm: AlgorithmConfig) -> Correction:
    return correct_mismatch(
        old,
        batch.rollout_logprobs,
        batch.loss_mask,
        batch.cu_seqlens,
        kind=algorithm.correction,
        low=algorithm.correction_low,
        high=algorithm.correction_high,
    )
