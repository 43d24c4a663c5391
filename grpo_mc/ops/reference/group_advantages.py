"""Group advantages: each rollout's reward compared with the other rollouts of the same prompt draw.

    A_i = r_i - b_i                      scale "none"
    A_i = (r_i - b_i) / (std + eps)      otherwise

b_i and std are statistics of the valid rollouts of the group (`batch_std`: std of the valid rollouts of the batch).
Everything is computed in float64 in two passes (mean first, then squared differences), so that rewards with a large
common offset lose nothing. There is no gradient: rewards are data.

Sources: GRPO arXiv 2402.03300, Dr. GRPO 2503.20783 (scale "none"), RLOO 2402.14740 (baseline "leave_one_out").
"""

from __future__ import annotations

import torch
from torch import Tensor

BASELINES = ("mean", "leave_one_out")
SCALES = ("std", "leave_one_out_std", "batch_std", "none")

LEAVE_ONE_OUT_FLOOR = 1e-3
"""leave_one_out_std divides rollout i only where the std of the others is above eps and above this fraction of the
whole group's std (ddof 0). A lone right answer among equal wrong ones has others with std 0, and one among almost
equal ones would be blown up without bound; both keep A_i = r_i - b_i."""


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
        rewards: [N] float32 or float64. NaN and infinities count as invalid.
        group_ids: [N] int64, any values in any order; equal ids form a group.
        baseline: "mean" of the group, or "leave_one_out", the mean of the others.
        scale: "std" of the group; "leave_one_out_std", std of the others with ddof 1, applied only above
            LEAVE_ONE_OUT_FLOOR; "batch_std", std over all valid rollouts of the call; "none".
        ddof: 0 or 1, subtracted from the count under the std ("std" and "batch_std").
        eps: added to the std, >= 0.
        valid: [N] bool, false = unscored; None = all valid.

    Returns:
        [N], dtype of rewards. Exactly 0 for an invalid rollout, for a group with fewer than two valid rollouts, and
        for a group whose valid rewards are all equal.

    Raises:
        ValueError: unknown baseline or scale, ddof not 0 or 1, negative eps, shapes that differ.
    """
    _check(rewards, group_ids, baseline, scale, ddof, eps, valid)
    usable = torch.isfinite(rewards)
    if valid is not None:
        usable = usable & valid.bool()
    r = rewards.double()
    advantages = torch.zeros_like(r)
    batch_std = _std(r[usable], ddof) if scale == "batch_std" else 0.0
    for group_id in torch.unique(group_ids):
        rows = torch.nonzero((group_ids == group_id) & usable).flatten()
        group = r[rows]  # [n] float64
        if len(rows) < 2 or bool(group.max() == group.min()):
            continue
        advantages[rows] = _one_group(group, baseline, scale, ddof, eps, batch_std)
    return advantages.to(rewards.dtype)


def _one_group(group: Tensor, baseline: str, scale: str, ddof: int, eps: float, batch_std: float) -> Tensor:
    """[n] float64 advantages of one group of n >= 2 valid rewards that are not all equal."""
    n = len(group)
    others = [torch.cat([group[:i], group[i + 1 :]]) for i in range(n)]
    if baseline == "mean":
        centered = group - group.mean()
    else:
        centered = torch.stack([group[i] - others[i].mean() for i in range(n)])
    if scale == "none":
        return centered
    if scale == "std":
        return centered / (_std(group, ddof) + eps)
    if scale == "batch_std":
        return centered / (batch_std + eps)
    floor = max(eps, LEAVE_ONE_OUT_FLOOR * _std(group, 0))
    for i in range(n):
        std = _std(others[i], 1)
        if std > floor:
            centered[i] = centered[i] / (std + eps)
    return centered


def _std(values: Tensor, ddof: int) -> float:
    """sqrt(sum (v - mean)^2 / (n - ddof)) in two passes; 0 where n - ddof < 1 (a single value has no spread)."""
    count = len(values) - ddof
    if count < 1:
        return 0.0
    return float(((values - values.mean()).square().sum() / count).sqrt())


def _check(
    rewards: Tensor, group_ids: Tensor, baseline: str, scale: str, ddof: int, eps: float, valid: Tensor | None
) -> None:
    if rewards.dim() != 1 or group_ids.shape != rewards.shape or (valid is not None and valid.shape != rewards.shape):
        got = [list(t.shape) for t in (rewards, group_ids) + (() if valid is None else (valid,))]
        raise ValueError(f"group_advantages: rewards, group_ids and valid have shapes {got}; all must be the same [N]")
    if rewards.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"group_advantages: rewards are {rewards.dtype}; pass float32 or float64")
    if baseline not in BASELINES:
        raise ValueError(f"group_advantages: baseline is {baseline!r}; use one of {', '.join(BASELINES)}")
    if scale not in SCALES:
        raise ValueError(f"group_advantages: scale is {scale!r}; use one of {', '.join(SCALES)}")
    if ddof not in (0, 1):
        raise ValueError(f"group_advantages: ddof is {ddof}; use 0 (population std) or 1 (sample std)")
    if not eps >= 0:
        raise ValueError(f"group_advantages: eps is {eps}; it must be >= 0")
