"""The product of rows with a weight matrix, as a linear layer without bias has it."""

from __future__ import annotations

from torch import Tensor


def row_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x weight^T.

    Args:
        x: [M, K] float.
        weight: [N, K], dtype of x.

    Returns:
        [M, N], dtype of x.

    Raises:
        ValueError: shapes that do not fit.
    """
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"row_linear: x is {list(x.shape)} and weight {list(weight.shape)}; they must be [M, K] and [N, K]"
        )
    return x @ weight.t()
