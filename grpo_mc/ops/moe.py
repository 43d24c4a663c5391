"""Mixture of experts on one rank: routing, moving tokens to their experts' rows, and summing rows back to tokens.

Rows lie in the order of the experts, the rows of one expert in the order of the tokens and their choices, so the order
never depends on threads. Between ranks rows travel by grpo_mc.megatron's dispatcher.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from grpo_mc.ops.device import check_devices, check_written
from grpo_mc.ops.loader import load

load()

_LEAST_SUM = 1e-20
"""Added to the sum of a token's weights, so that weights of 0 stay 0."""


def moe_route(
    logits: Tensor, *, top_k: int, score: str = "softmax", bias: Tensor | None = None, normalize: bool = False
) -> tuple[Tensor, Tensor]:
    """The experts of each token and their weights.

    Args:
        logits: [T, E] float.
        top_k: Experts of a token.
        score: "softmax" over all experts, or "sigmoid" of each.
        bias: [E] added to the scores for choosing only (load balancing without an auxiliary loss, arXiv 2408.15664);
            it is in no weight and gets no gradient (H18). None = no bias.
        normalize: Divide a token's weights by their sum.

    Returns:
        (expert_ids [T, top_k] int64, best first and ties to the lower expert; probs [T, top_k] float32, float64 for
        float64 logits, differentiable). A NaN among a token's logits gives it weights of NaN.

    Raises:
        ValueError: shapes, top_k above E, an unknown score.
    """
    check_devices("moe_route", logits=logits, bias=bias)
    if logits.dim() != 2 or not 1 <= top_k <= logits.shape[1]:
        raise ValueError(f"moe_route: logits is {list(logits.shape)} and top_k {top_k}; they must be [T, E] and 1 to E")
    if bias is not None and bias.shape != logits.shape[1:]:
        raise ValueError(f"moe_route: bias has shape {list(bias.shape)}; it must be [{logits.shape[1]}]")
    wide = logits if logits.dtype == torch.float64 else logits.float()
    if score == "softmax":
        scores = wide.softmax(-1)
    elif score == "sigmoid":
        scores = wide.sigmoid()
    else:
        raise ValueError(f"moe_route: score is {score!r}; it must be 'softmax' or 'sigmoid'")
    choice = scores.detach() if bias is None else scores.detach() + bias.detach().to(scores.dtype)
    expert_ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    probs = scores.gather(1, expert_ids)
    probs = torch.where(scores.isnan().any(-1, keepdim=True), torch.nan, probs)
    return expert_ids, probs / (probs.sum(-1, keepdim=True) + _LEAST_SUM) if normalize else probs


def moe_plan(
    expert_ids: Tensor, *, num_experts: int, capacity: int | None = None, align: int = 1
) -> tuple[Tensor, Tensor]:
    """Where moe_permute moves the tokens: (row_map [T, K] int64, offsets [E + 1] int64), arguments as there.

    An expert out of range is a ValueError; on a GPU, where that would wait for the device, no choice has a row then,
    offsets[0] is that expert and offsets[E] -1.
    """
    return torch.ops.grpo_mc.moe_plan(expert_ids, num_experts, capacity, align)


def moe_place(x: Tensor, row_map: Tensor, *, out: Tensor) -> Tensor:
    """Each token's row at its places of a map, zeros at places of no token. Not differentiable.

    Args:
        x: [T, H], any dtype.
        row_map: [T, K] int64 from moe_plan; -1 = nowhere.
        out: [R, H], the dtype of x, written; its rows may lie apart.

    Returns:
        out.

    Raises:
        ValueError: shapes, dtypes, a row out of range or named twice, an out that needs a gradient. On a GPU the map's
            values are not read by the host: rows out of range are left out, the later choice of a row counts.
    """
    check_devices("moe_place", x=x, row_map=row_map, out=out)
    check_written("moe_place", "out", out)
    # The map stands in for the weights, which nobody wants here.
    torch.ops.grpo_mc.moe_permute_(out, row_map.new_empty(out.shape[0]), x.detach(), row_map, row_map)
    return out


def moe_permute(
    x: Tensor,
    expert_ids: Tensor,
    probs: Tensor,
    *,
    num_experts: int,
    capacity: int | None = None,
    align: int = 1,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Each token's row at every place of its experts, differentiable in x and probs.

    Args:
        x: [T, H], any dtype; gradients for float32, bfloat16 and float64.
        expert_ids: [T, K] int64; -1 = no expert.
        probs: [T, K] weights of the choices.
        num_experts: E.
        capacity: Most rows of an expert; later choices, in the order of the tokens, are dropped. None = no bound.
        align: Each expert's rows are filled up with rows of zeros, of prob 0, to a multiple of it.
        out: [at least R, H], the dtype of x: rows are written there. Not differentiable.

    Returns:
        (rows [R, H], row_probs [R], row_map [T, K] int64: the row of each choice, -1 for none and dropped ones;
        offsets [E + 1] int64: where each expert's rows begin).

    Raises:
        ValueError: shapes, dtypes, an expert out of range, an out that is too small or would need a gradient.
    """
    check_devices("moe_permute", x=x, expert_ids=expert_ids, probs=probs, out=out)
    row_map, offsets = moe_plan(expert_ids, num_experts=num_experts, capacity=capacity, align=align)
    num_rows = int(offsets[-1])
    if num_rows < 0:
        raise ValueError(
            f"moe_permute: expert_ids holds {int(offsets[0])}; it must hold -1 (none) to {num_experts - 1}"
        )
    if out is None:
        return (*torch.ops.grpo_mc.moe_permute(x, probs, row_map, num_rows), row_map, offsets)
    check_written("moe_permute", "out", out)
    if torch.is_grad_enabled() and (x.requires_grad or probs.requires_grad):
        raise ValueError("moe_permute: out is given and x or probs needs a gradient; leave out away, or detach them")
    if out.dim() != 2 or out.shape[0] < num_rows:
        raise ValueError(f"moe_permute: out is {list(out.shape)}; it must be [at least {num_rows}, {x.shape[-1]}]")
    rows, row_probs = out[:num_rows], probs.new_empty(num_rows)
    torch.ops.grpo_mc.moe_permute_(rows, row_probs, x, probs, row_map)
    return rows, row_probs, row_map, offsets


def moe_unpermute(rows: Tensor, row_map: Tensor, probs: Tensor | None, *, out: Tensor | None = None) -> Tensor:
    """Each token's sum of prob * row over its choices, summed in float32 in their order; differentiable.

    Args:
        rows: [R, H] float32, bfloat16 or float64.
        row_map: [T, K] int64 from moe_permute.
        probs: [T, K]; None = 1.
        out: [T, H], the dtype of rows. Not differentiable.

    Returns:
        [T, H] in the dtype of rows; 0 for a token without a row.

    Raises:
        ValueError: shapes, dtypes, a row out of range or named twice, an out that would need a gradient. On a GPU the
            map's values are not read by the host: a token with a row out of range is NaN, a row can be named twice.
    """
    check_devices("moe_unpermute", rows=rows, row_map=row_map, probs=probs, out=out)
    if out is None:
        return torch.ops.grpo_mc.moe_unpermute(rows, row_map, probs)
    check_written("moe_unpermute", "out", out)
    if torch.is_grad_enabled() and (rows.requires_grad or (probs is not None and probs.requires_grad)):
        raise ValueError(
            "moe_unpermute: out is given and rows or probs needs a gradient; leave out away, or detach them"
        )
    torch.ops.grpo_mc.moe_unpermute_(out, rows, row_map, probs)
    return out


@torch.library.register_fake("grpo_mc::moe_plan")
def _fake_plan(expert_ids: Tensor, num_experts: int, capacity: int | None, align: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(expert_ids, memory_format=torch.contiguous_format), expert_ids.new_empty(num_experts + 1)


@torch.library.register_fake("grpo_mc::moe_permute")
def _fake_permute(x: Tensor, probs: Tensor, row_map: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    return x.new_empty(num_rows, x.shape[1]), probs.new_empty(num_rows)


@torch.library.register_fake("grpo_mc::moe_permute_")
def _fake_permute_in_place(rows: Tensor, row_probs: Tensor, x: Tensor, probs: Tensor, row_map: Tensor) -> None:
    return None


@torch.library.register_fake("grpo_mc::moe_unpermute")
def _fake_unpermute(rows: Tensor, row_map: Tensor, probs: Tensor | None) -> Tensor:
    return rows.new_empty(row_map.shape[0], rows.shape[1])


@torch.library.register_fake("grpo_mc::moe_unpermute_")
def _fake_unpermute_in_place(out: Tensor, rows: Tensor, row_map: Tensor, probs: Tensor | None) -> None:
    return None


@torch.library.register_fake("grpo_mc::moe_unpermute_backward")
def _fake_unpermute_backward(grad_out: Tensor, rows: Tensor, row_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
    return rows.new_empty(rows.shape), probs.new_empty(probs.shape)


def _save_map(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(inputs[2])


def _permute_backward(ctx: Any, grad_rows: Tensor, grad_row_probs: Tensor) -> tuple[Tensor | None, ...]:
    (row_map,) = ctx.saved_tensors
    grad_x = grad_probs = None
    if ctx.needs_input_grad[0]:
        grad_x = torch.ops.grpo_mc.moe_unpermute(grad_rows, row_map, None)
    if ctx.needs_input_grad[1]:
        with_none = torch.cat([grad_row_probs, grad_row_probs.new_zeros(1)])  # index -1 finds the 0
        grad_probs = with_none[row_map]
    return grad_x, grad_probs, None, None


def _save_unpermute(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _unpermute_backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    rows, row_map, probs = ctx.saved_tensors
    weights = probs if probs is not None else torch.ones(row_map.shape, dtype=rows.dtype, device=rows.device)
    grad_rows, grad_probs = torch.ops.grpo_mc.moe_unpermute_backward(grad_out, rows, row_map, weights)
    return grad_rows, None, grad_probs if probs is not None else None


torch.library.register_autograd("grpo_mc::moe_permute", _permute_backward, setup_context=_save_map)
torch.library.register_autograd("grpo_mc::moe_unpermute", _unpermute_backward, setup_context=_save_unpermute)
