"""The product of few rows with a weight matrix, for decoding: x [M, K] times weight [N, K] transposed.

BLAS repacks the weights before it multiplies, which for a few dozen rows costs as much as the product. Here dot
products run along K, straight from the weights as they lie in memory, so each weight is read once. Every output is
summed in an order that depends on K alone: a row's result is the same bit for bit whatever the other rows, their
number, or the number of threads. CPU and GPU have an order each. There is no gradient: the operator decodes.

From some 128 rows on BLAS is as fast; the caller decides.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_mc.ops.device import check_devices
from grpo_mc.ops.loader import load

load()


def row_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x weight^T.

    Args:
        x: [M, K] float32.
        weight: [N, K] float32; entries of a row adjacent in memory (else it is copied).

    Returns:
        [M, N] float32.

    Raises:
        ValueError: shapes or dtypes that do not fit, tensors on two devices.
    """
    check_devices("row_linear", x=x, weight=weight)
    return torch.ops.grpo_mc.row_linear(x, weight)


@torch.library.register_fake("grpo_mc::row_linear")
def _fake(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])
