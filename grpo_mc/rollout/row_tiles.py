"""Batch-invariant arithmetic: what a row gives does not depend on the other rows of the batch, to the last bit.

A matrix product rounds in an order that its library chooses by the shapes, so a row's result changes in the last bits
with the number of rows beside it; sampling then draws another token now and then. Here every product runs on tiles of a
fixed number of rows, the last one filled up with zeros: one shape, hence one order, and each row of a tile is rounded
alike. Activation functions run in pieces that one thread computes, since the vector and the scalar code that a row is
dealt to differ in the last bit. The other operations of the model (norms, attention, rotations) work row by row.

The guarantee is for one machine type, library version and number of threads. It costs time when the rows do not fill
their last tile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

TILE_ROWS = 32
"""A multiple of 32, so that every tile of a bf16 or float32 matrix begins at a cache line."""
_SERIAL_ELEMENTS = 32768
"""torch computes elementwise operations of up to so many elements on one thread."""


def _tiled_product(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, K] times weight [K, N] -> [T, N], TILE_ROWS rows at a time."""
    count, width = x.shape
    padded = -(-count // TILE_ROWS) * TILE_ROWS
    if padded != count or not x.is_contiguous() or x.data_ptr() % 64:
        filled = x.new_zeros(padded, width)
        filled[:count] = x
        x = filled
    out = x.new_empty(padded, weight.shape[1])
    for at in range(0, padded, TILE_ROWS):
        torch.mm(x[at : at + TILE_ROWS], weight, out=out[at : at + TILE_ROWS])
    return out[:count]


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., K] times weight [K, N]."""
    return _tiled_product(x.flatten(0, -2), weight).view(*x.shape[:-1], weight.shape[1])


def _serial_rows(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """An elementwise function of x [..., K], each row split alike between vector and scalar code."""
    if x.device.type != "cpu":
        return function(x)
    rows = x.flatten(0, -2) if x.dim() > 1 else x[None]
    if rows.is_contiguous():
        rows = F.pad(rows, (0, 1))[:, :-1]  # contiguous rows would be joined to one long one
    count = max(1, _SERIAL_ELEMENTS // max(1, x.shape[-1]))
    pieces = [function(rows[at : at + count]) for at in range(0, len(rows), count)]
    return torch.cat(pieces).view(x.shape) if pieces else function(x)


class FixedRowTiles(TorchFunctionMode):
    """Inside this context matrix products and activation functions are batch-invariant. Forward only."""

    _PRODUCTS = (torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in self._PRODUCTS and not kwargs and args[0].dim() > 1 and args[1].dim() == 2:
            return _product(args[0], args[1])
        if func is F.linear:
            return self._linear(*args, **kwargs)
        if func is F.silu:
            return _serial_rows(F.silu, args[0])
        return func(*args, **kwargs)

    @staticmethod
    def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        out = _product(input, weight.t())
        return out if bias is None else out + bias
