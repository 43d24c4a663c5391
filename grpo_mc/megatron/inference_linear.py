"""Megatron-Core's linear layers without what only training needs.

In training every linear layer is an autograd function with communication for the backward pass around its product. A
decoding step runs some hundred products of few rows, and that machinery costs as much Python time as the rest of the
model. In this context the layers multiply directly, few rows by the operator `row_linear`; between tensor-parallel
ranks they communicate as before. Layers that train in FP8 multiply here by their weights as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor

from grpo_mc.ops import row_linear

Linear: TypeAlias = ColumnParallelLinear | RowParallelLinear

FEW_ROWS = 128
"""Up to so many rows `row_linear` is faster than BLAS (2 cores of an AMD EPYC, AVX2: 1.6x at 64 rows)."""


def product(x: Tensor, weight: Tensor, few_rows: int | None) -> Tensor:
    """x [..., K] times weight [N, K] transposed; `few_rows` None = by row_linear however many rows there are."""
    rows = x.numel() // max(1, x.shape[-1])
    fits = x.device.type == "cpu" and x.dtype == torch.float32 and weight.dtype == torch.float32
    if fits and (few_rows is None or rows <= few_rows):
        return row_linear(x.flatten(0, -2), weight).view(*x.shape[:-1], weight.shape[0])
    return torch.matmul(x, weight.t())


def _forward(
    layer: Linear,
    few_rows: int | None,
    x: Tensor,
    weight: Tensor | None = None,
    runtime_gather_output: bool | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The whole layer where one rank holds all of its weight: x [T, 1, K] -> ([T, 1, N], bias left to the caller)."""
    out = product(x, layer.weight if weight is None else weight, few_rows)
    if layer.bias is None:
        return out, None
    return (out, layer.bias) if layer.skip_bias_add else (out + layer.bias, None)


def _multiply(
    layer: Linear, few_rows: int | None, input: Tensor, weight: Tensor, bias: Tensor | None = None,
    sequence_parallel: bool = False, **training: Any,
) -> Tensor:  # fmt: skip
    """The product of a layer that is split over ranks; its forward communicates before and after."""
    if sequence_parallel:  # the stock product gathers its input first
        return ColumnParallelLinear._forward_impl(
            layer, input=input, weight=weight, bias=bias, sequence_parallel=True, **training
        )
    out = product(input, weight, few_rows)
    return out if bias is None else out + bias


@contextmanager
def inference_linears(model: torch.nn.Module, *, few_rows: int | None = FEW_ROWS) -> Iterator[None]:
    """Every linear layer of `model` multiplies directly; for use under torch.inference_mode.

    Args:
        few_rows: Products of up to so many float32 rows on the CPU go through row_linear; None = all of them, which
            makes a row's result independent of the batch (row_linear sums in an order of its own).
    """
    changed: list[tuple[torch.nn.Module, str]] = []
    try:
        for layer in model.modules():
            if isinstance(layer, SequentialMLP):  # expert by expert, through their linear layers
                changed.append((layer, "forward"))
                layer.forward = partial(SequentialMLP.forward, layer)
            elif isinstance(layer, ColumnParallelLinear | RowParallelLinear):
                alone = layer.tp_group.size() == 1
                name, replacement = ("forward", _forward) if alone else ("_forward_impl", _multiply)
                changed.append((layer, name))
                setattr(layer, name, partial(replacement, layer, few_rows))
        yield
    finally:
        for layer, name in changed:
            layer.__dict__.pop(name, None)
