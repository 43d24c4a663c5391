"""The root-mean-square norm (arXiv 1910.07467) in one call, for decoding: x / sqrt(mean(x^2) + eps) * weight.

torch composes it of several operations on the CPU, each a pass over the batch. Each row is summed in an order that
depends on its width alone, so its result is the same bit for bit whatever the other rows or the number of threads.
There is no gradient: the operator decodes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_mc.ops.device import check_devices
from grpo_mc.ops.loader import load

load()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim.

    Args:
        x: [..., H] float32. A row with NaN or inf gives NaN in that row.
        weight: [H] float32.
        eps: Added to the mean of squares; a row of zeros with eps 0 gives NaN.

    Returns:
        [..., H] float32, contiguous.

    Raises:
        ValueError: shapes or dtypes that do not fit, an eps that is not finite, tensors on two devices.
    """
    check_devices("rms_norm", x=x, weight=weight)
    return torch.ops.grpo_mc.rms_norm(x, weight, eps)


@torch.library.register_fake("grpo_mc::rms_norm")
def _fake(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)
