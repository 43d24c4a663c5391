"""Weight gradients straight into DDP's buffer, on the CPU.

Megatron-Core's linear layers can add their weight gradient to `weight.main_grad` inside the matrix product, through an
extension that exists for CUDA only. Here the product is BLAS's own accumulating one, plugged in where that extension is
looked up (cpu_runtime.ENTRIES), and the embedding does the same: its gradient touches only the rows that were looked
up, so no dense gradient of the whole table is made. Without this, every weight's gradient is written, read and added.
"""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

_MARK = "accumulates_lookups"


def add_weight_gradient(total_input: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
    """main_grad [out, in] += grad_output [T, out]^T total_input [T, in], in the dtype of main_grad."""
    if total_input.dtype == main_grad.dtype:
        main_grad.addmm_(grad_output.t(), total_input)
    else:
        main_grad.add_(grad_output.t().matmul(total_input))


class _Lookup(torch.autograd.Function):
    """Rows of a table; backward adds to the table's main_grad and hands autograd nothing."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(ids)
        ctx.weight = weight
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:  # type: ignore[override]
        (ids,) = ctx.saved_tensors
        main_grad = ctx.weight.main_grad
        main_grad.index_add_(0, ids.flatten(), grad.reshape(-1, grad.shape[-1]).to(main_grad.dtype))
        return None, None


def lookup(ids: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """F.embedding; for tables that `accumulate_into_buffers` marked, with the accumulating backward."""
    if getattr(weight, _MARK, False) and torch.is_grad_enabled() and not args and not kwargs:
        return _Lookup.apply(weight, ids)
    return F.embedding(ids, weight, *args, **kwargs)


def functional_with_lookup() -> types.ModuleType:
    """torch.nn.functional with `lookup` as its embedding, for the module that holds Megatron-Core's embedding."""
    proxy = types.ModuleType("torch.nn.functional")
    proxy.__dict__.update(vars(F))
    proxy.__dict__["embedding"] = lookup
    return proxy


def accumulate_into_buffers(model: GPTModel) -> None:
    """Switches a model that DDP has given gradient buffers to adding its weight gradients there directly.

    On CUDA Megatron-Core's own setting (gradient_accumulation_fusion, with its extension) is left as it is.
    """
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if weight is None and hasattr(module, "gradient_accumulation_fusion"):
            weight = model.shared_embedding_or_output_weight()  # an output layer that borrows the embedding's
        if weight is None or not hasattr(weight, "main_grad") or weight.device.type != "cpu":
            continue
        if hasattr(module, "gradient_accumulation_fusion"):
            setattr(module, "gradient_accumulation_fusion", True)  # noqa: B010 - mypy takes it for a submodule
        if type(module).__name__ == "VocabParallelEmbedding":
            setattr(weight, _MARK, True)
            # Set by Megatron-Core where embedding and output layer share a weight, for the embedding's dense gradient.
            setattr(weight, "zero_out_wgrad", False)  # noqa: B010
