"""Megatron-Core's linear layers without what only training needs.

In training every linear layer is an autograd function with communication for the backward pass around its product. A
decoding step runs some hundred products of few rows, and that machinery costs as much Python time as the rest of the
model. In this context the layers multiply directly; between tensor-parallel ranks they communicate as before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

Linear: TypeAlias = ColumnParallelLinear | RowParallelLinear


def _forward(
    layer: Linear, x: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
) -> tuple[Tensor, Tensor | None]:
    """The whole layer where one rank holds all of its weight: x [T, 1, K] -> ([T, 1, N], bias left to the caller)."""
    out = torch.matmul(x, (layer.weight if weight is None else weight).t())
    if layer.bias is None:
        return out, None
    return (out, layer.bias) if layer.skip_bias_add else (out + layer.bias, None)


def _multiply(
    layer: Linear, input: Tensor, weight: Tensor, bias: Tensor | None = None, sequence_parallel: bool = False,
    **training: Any,
) -> Tensor:  # fmt: skip
    """The product of a layer that is split over ranks; its forward communicates before and after."""
    if sequence_parallel:  # the stock product gathers its input first
        return type(layer)._forward_impl(
            layer, input=input, weight=weight, bias=bias, sequence_parallel=True, **training
        )
    out = torch.matmul(input, weight.t())
    return out if bias is None else out + bias


@contextmanager
def inference_linears(model: torch.nn.Module) -> Iterator[None]:
    """Every linear layer of `model` multiplies directly; for use under torch.inference_mode."""
    layers = [layer for layer in model.modules() if isinstance(layer, ColumnParallelLinear | RowParallelLinear)]
    changed: list[tuple[Linear, str]] = []
    try:
        for layer in layers:
            alone = layer.tp_group.size() == 1
            name, replacement = ("forward", _forward) if alone else ("_forward_impl", _multiply)
            changed.append((layer, name))
            setattr(layer, name, partial(replacement, layer))
        yield
    finally:
        for layer, name in changed:
            layer.__dict__.pop(name, None)
