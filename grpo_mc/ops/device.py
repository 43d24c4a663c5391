"""The check that the tensors of one call are on one device.

It stands in front of the dispatcher, which takes the implementation from all tensors together: with one of them on the
meta device it would compute nothing and return tensors without data.
"""

from __future__ import annotations

import torch
from torch import Tensor


def check_written(op: str, name: str, tensor: Tensor) -> None:
    """Refuses a tensor that an operator shall write into although autograd follows it, and tells autograd otherwise.

    Raises:
        ValueError: it needs a gradient.
    """
    if torch.is_grad_enabled() and tensor.requires_grad:
        raise ValueError(f"{op}: {name} is written in place and needs a gradient; detach it, or use torch.no_grad()")
    torch.autograd.graph.increment_version(tensor)


def check_devices(op: str, **tensors: Tensor | None) -> None:
    """Refuses tensors that are not on the device of the first one; None stands for an argument left out.

    Raises:
        ValueError: names the operator, the two tensors and their devices.
    """
    first, device = None, None
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if device is None:
            first, device = name, tensor.device
        elif tensor.device != device:
            raise ValueError(
                f"{op}: {name} is on {tensor.device} but {first} on {device}; "
                "all tensors of a call must be on one device"
            )
