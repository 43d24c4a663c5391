"""Linear layers that multiply in FP8 with a scale per tile, in place of Megatron-Core's.

All three products of y = x W^T are FP8 (e4m3) with float32 sums; T tokens, K inputs, N outputs:

    forward            y  [T, N] = x  in tiles of 1 x 128 along K   times  W  in tiles of 128 x 128
    input's gradient   dx [T, K] = dy in tiles of 1 x 128 along N   times  W  in the same tiles, read along N
    weight's gradient  dW [N, K] = dy and x both in tiles of 128 x 1 along T, summed in float32

Each operand is rounded once, from high precision: codes of tiles along K are never rounded again to tiles along T.
Weights, gradients and the optimizer's states keep their dtype (float32 or bfloat16), so checkpoints are those of the
plain layers. Saved for the backward pass are x as codes along T (a byte an entry, where the plain layer keeps two or
four) and the weight itself, whose codes are made again: quantising is deterministic, so recomputing a layer gives the
same numbers bit for bit. Under sequence parallelism ranks send codes and scales, not x, and tiles along T end where a
rank's tokens end. A size that is no multiple of 128, also after a split over tensor-parallel ranks, has a smaller last
tile. Gradients of a batch depend a little on how it is cut into micro-batches, since tiles along T do.

The embedding, the output layer, the norms, the router and attention itself stay in high precision.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor
from torch.autograd.function import once_differentiable

from grpo_mc.ops import fp8_gemm, quantize_fp8
from grpo_mc.ops.loader import implements

WEIGHT_TILE, TOKEN_TILE = (128, 128), (128, 1)

OPERATORS = ("quantize_fp8", "fp8_gemm_")
"""What the layers here need of a device."""
EXPERT_OPERATORS = (*OPERATORS, "fp8_grouped_gemm_", "fp8_grouped_wgrad_")
"""What a model with experts needs."""


@dataclass(frozen=True)
class Exchange:
    """What tensor-parallel ranks do around the products of one layer."""

    group: dist.ProcessGroup | None = None
    gathers: bool = False
    """Each rank has some of the tokens of x and keeps those of its gradient (sequence parallelism)."""
    sums: bool = False
    """The ranks' gradients of x are added up."""


class _Product(torch.autograd.Function):
    """x [..., K] times weight [N, K] transposed -> [..., N]; see the module's docstring."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, weight: Tensor, exchange: Exchange, adds_to_main_grad: bool
    ) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        codes, scale = (_gather(part, exchange) for part in quantize_fp8(rows))
        out = fp8_gemm(codes, scale, *quantize_fp8(weight, tile=WEIGHT_TILE), out_dtype=x.dtype)
        saved = quantize_fp8(rows, tile=TOKEN_TILE) if ctx.needs_input_grad[1] else ()
        ctx.save_for_backward(weight, *saved)
        ctx.exchange, ctx.shape = exchange, x.shape
        # Kept here as Megatron-Core does: it is written in place between the forward passes of a step.
        ctx.main_grad = getattr(weight, "main_grad", None) if adds_to_main_grad else None
        return out.view(-1, *x.shape[1:-1], out.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:  # type: ignore[override]
        weight, *saved = ctx.saved_tensors
        exchange: Exchange = ctx.exchange
        rows = grad.reshape(-1, grad.shape[-1])
        grad_x, grad_weight, wait = None, None, None
        if ctx.needs_input_grad[0]:
            codes, scale = quantize_fp8(weight, tile=WEIGHT_TILE)
            full = fp8_gemm(*quantize_fp8(rows), codes.t(), scale.t(), out_dtype=grad.dtype)
            grad_x, wait = _hand_on(full, exchange)
        if ctx.needs_input_grad[1]:
            total = gradient_target(weight, ctx.main_grad)
            codes, scale = (_gather(part, exchange) for part in saved)
            _add_weight_gradient(total, rows, codes, scale, exchange)
            grad_weight = finished_gradient(weight, total, ctx.main_grad)
        if wait is not None:
            wait.wait()
        return None if grad_x is None else grad_x.view(ctx.shape), grad_weight, None, None


def _gather(part: Tensor, exchange: Exchange) -> Tensor:
    """The parts of all ranks, one after the other; the part itself where nothing is split."""
    if not exchange.gathers:
        return part
    whole = part.new_empty(part.shape[0] * dist.get_world_size(exchange.group), part.shape[1])
    dist.all_gather_into_tensor(whole.view(torch.uint8), part.view(torch.uint8), group=exchange.group)
    return whole


def _hand_on(grad_x: Tensor, exchange: Exchange) -> tuple[Tensor, dist.Work | None]:
    """This rank's gradient of x once the returned work is done; the weight's gradient is computed meanwhile."""
    if exchange.gathers:
        mine = grad_x.new_empty(grad_x.shape[0] // dist.get_world_size(exchange.group), grad_x.shape[1])
        return mine, dist.reduce_scatter_tensor(mine, grad_x, group=exchange.group, async_op=True)
    if exchange.sums:
        return grad_x, dist.all_reduce(grad_x, group=exchange.group, async_op=True)
    return grad_x, None


def _add_weight_gradient(total: Tensor, grad: Tensor, codes: Tensor, scale: Tensor, exchange: Exchange) -> None:
    """total [N, K] += grad [T, N] transposed times x, given as codes and scales along T; each rank's tokens apart."""
    parts = dist.get_world_size(exchange.group) if exchange.gathers else 1
    split = (part.unflatten(0, (parts, part.shape[0] // parts)).unbind() for part in (grad, codes, scale))
    for rows, x_codes, x_scale in zip(*split, strict=True):
        grad_codes, grad_scale = quantize_fp8(rows, tile=TOKEN_TILE)
        fp8_gemm(grad_codes.t(), grad_scale.t(), x_codes.t(), x_scale.t(), accumulate_into=total)


def gradient_target(weight: Tensor, main_grad: Tensor | None) -> Tensor:
    """What a weight's gradient is added to: the gradient buffer it has, or float32 zeros."""
    return torch.zeros_like(weight, dtype=torch.float32) if main_grad is None else main_grad


def finished_gradient(weight: Any, total: Tensor, main_grad: Tensor | None) -> Tensor | None:
    """What autograd is handed for a weight whose gradient is complete in `total`.

    With a gradient buffer that is what Megatron-Core's layers hand it: a tensor nobody reads, so that hooks run in the
    backward thread, and the mark that the buffer already has the gradient.
    """
    if main_grad is None:
        return total.to(weight.dtype)
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    fill = torch.zeros_like if getattr(weight, "zero_out_wgrad", False) else torch.empty_like
    return fill(weight, requires_grad=False)


def trained(weight: Tensor) -> Tensor:
    """The weight; where no gradient is recorded, one that needs none: nothing is then quantised for a backward pass."""
    return weight if torch.is_grad_enabled() else weight.detach()


def tile_scaled_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, adds_to_main_grad: bool = False,
    exchange: Exchange = Exchange(),
) -> Tensor:  # fmt: skip
    """x times weight transposed in FP8, plus bias.

    Args:
        x: [..., K] float32 or bfloat16, at least two dims.
        weight: [N, K] float32 or bfloat16.
        bias: [N].
        adds_to_main_grad: The weight's gradient is added to weight.main_grad (float32 or bfloat16), where it has one.
        exchange: With `gathers` the first dim of x is this rank's part.

    Returns:
        [..., N] in x's dtype.

    Raises:
        ValueError: shapes or dtypes.
    """
    out = _Product.apply(x, trained(weight), exchange, adds_to_main_grad)
    return out if bias is None else out + bias


class TileScaledLinear(torch.nn.Linear):
    """torch.nn.Linear in FP8: same parameters, same state dict."""

    gradient_accumulation_fusion = False
    """Add the weight's gradient to weight.main_grad where it has one."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N]."""
        return tile_scaled_linear(x, self.weight, self.bias, adds_to_main_grad=self.gradient_accumulation_fusion)


def check_device(device: torch.device, *, has_experts: bool) -> None:
    """Refuses a device on which the products have no implementation, before a model is built there.

    Raises:
        ValueError: Names the operators that are missing.
    """
    needed = EXPERT_OPERATORS if has_experts else OPERATORS
    missing = [name for name in needed if not implements(name, device.type)]
    if missing:
        raise ValueError(
            f"model.fp8 is tile_scaled, but {', '.join(missing)} cannot run on {device.type}; set model.fp8=none"
        )


class _TileScaled:
    """The product of a tensor-parallel layer; everything around it is Megatron-Core's."""

    def _forward_impl(
        self, input: Tensor, weight: Tensor, bias: Tensor | None, gradient_accumulation_fusion: bool,
        allreduce_dgrad: bool, sequence_parallel: bool, tp_group: dist.ProcessGroup | None,
        grad_output_buffer: list[Tensor] | None = None, wgrad_deferral_limit: int | None = None,
    ) -> Tensor:  # fmt: skip
        if grad_output_buffer is not None:
            raise ValueError(
                "tile_scaled_linear: the layer shall put off its weight's gradient (defer_embedding_wgrad_compute), "
                "which only a plain output layer does; leave the output layer plain"
            )
        exchange = Exchange(tp_group, gathers=sequence_parallel, sums=allreduce_dgrad)
        return tile_scaled_linear(
            input, weight, bias, adds_to_main_grad=gradient_accumulation_fusion, exchange=exchange
        )


class TileScaledColumnParallelLinear(_TileScaled, ColumnParallelLinear):
    """Megatron-Core's ColumnParallelLinear in FP8: same arguments, weights and checkpoints."""


class TileScaledRowParallelLinear(_TileScaled, RowParallelLinear):
    """Megatron-Core's RowParallelLinear in FP8: same arguments, weights and checkpoints."""
