"""Group advantages: each rollout's reward compared with the other rollouts of the same prompt draw.

    A_i = r_i - b_i                      scale "none"
    A_i = (r_i - b_i) / (std + eps)      otherwise

b_i and std are statistics of the valid rollouts of the group (batch_std: std of the valid rollouts of the call), in
float64 and in two passes, so that rewards with a large common offset lose nothing. There is no gradient: rewards are
data. Quantile clipping of rewards is a step before this one, in grpo_mc.algorithms. CPU and GPU add in different orders
and may differ by float64's rounding; each gives the same result on every run.

Sources: GRPO arXiv 2402.03300, Dr. GRPO 2503.20783 (scale "none"), RLOO 2402.14740 (baseline "leave_one_out").
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_mc.ops.device import check_devices
from grpo_mc.ops.loader import load

load()


def group_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    baseline: str = "mean",
    scale: str = "std",
    ddof: int = 0,
    eps: float = 1e-4,
    valid: Tensor | None = None,
) -> Tensor:
    """Advantage of every rollout inside its group.

    Args:
        rewards: [N] float32 or float64. NaN and infinities count as invalid (H03).
        group_ids: [N] int64, any values in any order; equal ids form a group.
        baseline: "mean" of the group, or "leave_one_out", the mean of the others.
        scale: "std" of the group; "leave_one_out_std", std of the others with ddof 1, applied only where it is above
            eps and above a thousandth of the group's std (elsewhere A_i = r_i - b_i, so none explodes); "batch_std",
            std over all valid rollouts of the call; "none".
        ddof: 0 or 1, subtracted from the count under the std ("std" and "batch_std").
        eps: added to the std, >= 0.
        valid: [N] bool, false = unscored; None = all valid.

    Returns:
        [N], dtype of rewards. Exactly 0 for an invalid rollout, for a group with fewer than two valid rollouts, and
        for a group whose valid rewards are all equal (H01, H02).

    Raises:
        ValueError: unknown baseline or scale, ddof not 0 or 1, eps negative or not finite, shapes or dtypes that do not
            fit, tensors on several devices.
    """
    check_devices("group_advantages", rewards=rewards, group_ids=group_ids, valid=valid)
    return torch.ops.grpo_mc.group_advantages(rewards.detach(), group_ids, valid, baseline, scale, ddof, eps)


@torch.library.register_fake("grpo_mc::group_advantages")
def _fake(
    rewards: Tensor, group_ids: Tensor, valid: Tensor | None, baseline: str, scale: str, ddof: int, eps: float
) -> Tensor:
    return rewards.new_empty(rewards.shape)
