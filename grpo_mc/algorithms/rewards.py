"""What happens to rewards before advantages: validity, overlong shaping, KL in the reward, quantile normalisation.

Pure functions on numbers and records. A rollout that was not scored, or scored with something that is not finite, is
invalid: NaN in the reward array, advantage 0, out of the loss and of every denominator (H03).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from grpo_mc.algorithms.kl import reward_kl
from grpo_mc.data.records import FinishReason, Rollout

_LARGEST = float(np.finfo(np.float32).max)


def usable_reward(rollout: Rollout) -> float | None:
    """The reward of a rollout that may enter group statistics, else None.

    None for an unscored rollout, a reward that is not finite in float32, and a failed rollout (it has no usable
    tokens).
    """
    if rollout.reward is None or rollout.finish_reason is FinishReason.FAILED:
        return None
    is_usable = math.isfinite(rollout.reward) and abs(rollout.reward) <= _LARGEST
    return rollout.reward if is_usable else None


def overlong_penalty(response_length: int, max_new_tokens: int, buffer: int, penalty: float) -> float:
    """DAPO's soft overlong punishment, as an amount to add to the reward.

        0                                                  up to max_new_tokens - buffer
        -penalty * (length - (max - buffer)) / buffer      inside the buffer
        -penalty                                           at and beyond max_new_tokens

    Args:
        response_length: tokens.
        max_new_tokens: the limit of a response, tokens.
        buffer: tokens before the limit over which the penalty grows, in [1, max_new_tokens].
        penalty: >= 0, at the limit.

    Raises:
        ValueError: buffer out of range.
    """
    if not 1 <= buffer <= max_new_tokens:
        raise ValueError(
            f"overlong_penalty: algorithm.overlong_buffer is {buffer} but rollout.max_new_tokens is {max_new_tokens}; "
            f"the buffer must be in [1, {max_new_tokens}]"
        )
    excess = response_length - (max_new_tokens - buffer)
    return -penalty * min(max(excess / buffer, 0.0), 1.0)


def kl_in_reward(rollout: Rollout, beta: float) -> float:
    """-beta * sum k1 of a rollout, from the log-probs it was sampled with.

    Raises:
        ValueError: the rollout has no reference log-probs.
    """
    if rollout.ref_logprobs is None:
        raise ValueError(
            f"kl_in_reward: rollout {rollout.group_id}/{rollout.sample_index} has no ref_logprobs but "
            f"algorithm.beta is {beta} with kl_placement in_reward; run the reference pass before advantages"
        )
    return -beta * reward_kl(rollout.rollout_logprobs, rollout.ref_logprobs, rollout.response_mask)


def quantile_normalise(rewards: Sequence[float] | npt.NDArray[np.float64], q: float) -> npt.NDArray[np.float64]:
    """Rewards clipped to their own [q, 1 - q] quantile range (linear interpolation), 0 at its start and 1 at its end.

    One outlier then moves nobody's baseline by more than the width of the bulk. Where the range has width 0 (a lone
    success among equal failures) clipping would erase the only signal there is, so the rewards are returned unchanged.

    Args:
        rewards: [n] valid rewards of one group.
        q: in (0, 0.5).

    Returns:
        [n] float64.

    Raises:
        ValueError: q out of range.
    """
    if not 0 < q < 0.5:
        raise ValueError(f"quantile_normalise: algorithm.quantile is {q}; it must be in (0, 0.5)")
    values = np.asarray(rewards, np.float64)
    if len(values) == 0:
        return values
    low, high = np.quantile(values, [q, 1 - q])
    if high <= low:
        return values
    return (values.clip(low, high) - low) / (high - low)


def is_constant(rewards: Sequence[float]) -> bool:
    """True when the rewards are all equal as float32 numbers: the group has no policy gradient (H01).

    Exact comparison, no tolerance, and no look at the mean: a group of equal graded rewards is as useless as one of
    all ones. An empty sequence is constant.
    """
    return len({float(np.float32(reward)) for reward in rewards}) <= 1
