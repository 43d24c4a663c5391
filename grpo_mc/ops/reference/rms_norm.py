"""The root-mean-square norm (arXiv 1910.07467)."""

from __future__ import annotations

from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim.

    Args:
        x: [..., H] float.
        weight: [H], dtype of x.
        eps: Added to the mean of squares.

    Returns:
        [..., H], dtype of x.

    Raises:
        ValueError: shapes that do not fit.
    """
    if x.dim() < 1 or weight.dim() != 1 or x.shape[-1] != weight.shape[0]:
        raise ValueError(
            f"rms_norm: x is {list(x.shape)} and weight {list(weight.shape)}; they must be [..., H] and [H]"
        )
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight
