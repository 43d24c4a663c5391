"""Expert parallelism: tokens travel to the ranks of their experts (dispatch), and the experts' rows back (combine).

Rank r of the group holds experts r * E / ranks to (r + 1) * E / ranks - 1. A token travels once to each rank that holds
one of its experts, however many it holds, with its expert ids and weights beside it; there it is copied to the rows of
its experts. On the way back an expert's rank sums its rows of a token, and one row a rank travels:

    dispatch   row = x[token]                                                 for each expert of the token
    combine    out[token] = sum over ranks of (sum over its experts there of prob * expert_out[row])

Orders, which never depend on threads or timing: an expert's rows lie in the order (source rank, token, choice), a
capacity drops the last of them; the inner sum runs in the order of the choices, the outer one in the order of the
ranks, both in float32 (float64 for float64 rows), each rounded once to the dtype that travels.

Backward is the same transport: dispatch's gradient travels like combine's rows and the reverse. Every rank of the group
has to run it, also one without tokens or rows. The weights' gradient returns beside the tokens'.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from grpo_mc.megatron.moe_transport import TokenTransport, plan_transport
from grpo_mc.ops import dequantize_fp8, moe_permute, moe_unpermute, quantize_fp8
from grpo_mc.ops.moe import moe_place

PAYLOADS = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
"""Dtypes of the rows in the messages; "fp8" is codes with a scale for each 128 columns."""


@dataclass(frozen=True)
class ReceivedTokens:
    """The tokens that this rank's experts have to see, once each, in the order (source rank, token)."""

    transport: TokenTransport
    x: Tensor
    """[N, H] in the dtype of the tokens."""
    expert_ids: Tensor
    """[N, K] int64 in this rank's experts; -1 = an expert elsewhere, or none."""
    probs: Tensor
    """[N, K] weights of the choices."""
    anchor: Tensor
    """[] A zero through which combine's backward reaches dispatch's on a rank whose experts used no row."""
    wire_dtype: torch.dtype
    """Of combined rows and of gradients in the messages."""
    codes: Tensor | None
    """[N, H] float8_e4m3fn, with the payload fp8."""
    scale: Tensor | None
    """[N, ceil(H / 128)] float32, with the payload fp8."""


@dataclass(frozen=True)
class DispatchHandle:
    """What combine needs to know of a dispatch."""

    received: ReceivedTokens
    row_map: Tensor
    """[N, K] int64: the expert rows of each received token, -1 = none or dropped."""
    num_rows: int
    """R, the rows of all local experts, padding included."""

    def quantized_rows(self) -> tuple[Tensor, Tensor]:
        """The experts' rows as they travelled with the payload fp8, for fp8_grouped_gemm.

        Returns:
            (codes [R, H] float8_e4m3fn, scale [R, ceil(H / 128)] float32); both 0 in rows of padding. No gradient.

        Raises:
            ValueError: another payload.
        """
        codes, scale = self.received.codes, self.received.scale
        if codes is None or scale is None:
            raise ValueError("quantized_rows: the rows travelled without FP8; dispatch them with payload='fp8'")
        placed = (
            moe_place(part, self.row_map, out=part.new_empty(self.num_rows, part.shape[1])) for part in (codes, scale)
        )
        return next(placed), next(placed)


class Dispatched(NamedTuple):
    """The rows of this rank's experts."""

    rows: Tensor
    """[R, H] in the order of the experts."""
    row_probs: Tensor
    """[R]; 0 in rows of padding."""
    offsets: Tensor
    """[local experts + 1] int64: where each expert's rows begin."""
    handle: DispatchHandle


def dispatch(
    x: Tensor,
    expert_ids: Tensor,
    probs: Tensor,
    group: dist.ProcessGroup,
    num_experts: int,
    *,
    payload: str | None = None,
    capacity: int | None = None,
    align: int = 1,
    etp: int = 1,
) -> Dispatched:
    """The rows that this rank's experts have to compute, differentiable in x and probs; a collective call.

    Args:
        x: [T, H] float32, bfloat16 or float64; T may differ between ranks and be 0.
        expert_ids: [T, K] int64; -1 = no expert.
        probs: [T, K] weights of the choices, float32 (float64 for float64 tokens).
        group: The ranks that hold the experts. Its timeout bounds every wait.
        num_experts: E, a multiple of the ranks / etp.
        payload: What the rows travel as: "fp8" (codes and scales of quantize_fp8; gradients and combined rows travel
            in the dtype of x), "bf16", "fp32", "fp64"; None = the dtype of x. The same on every rank.
        capacity: Most rows of an expert over all sources; later ones, in the order (source rank, token, choice), are
            dropped where they arrive. None = no bound.
        align: Each expert's rows are filled up with rows of zeros, of prob 0, to a multiple of it.
        etp: Neighboring ranks that hold parts of the same experts: each gets the tokens, and combine sums the parts.

    Returns:
        Dispatched; rows have the dtype of x.

    Raises:
        ValueError: shapes, dtypes, an expert out of range, experts that do not divide, ranks that differ.
    """
    received = send_tokens(x, expert_ids, probs, group, num_experts, payload=payload, etp=etp)
    return expand(received, num_experts * etp // dist.get_world_size(group), capacity=capacity, align=align)


def combine(expert_out: Tensor, handle: DispatchHandle, *, weighted: bool = True) -> Tensor:
    """Each token's sum over its experts, differentiable in expert_out and dispatch's probs; a collective call.

    Args:
        expert_out: [R, H] float32, bfloat16 or float64, a row for each of dispatch's; rows of padding are not read.
        handle: From dispatch.
        weighted: Multiply each row by its prob; False where the experts did that.

    Returns:
        [T, H] in the dtype of expert_out; 0 for a token without an expert.

    Raises:
        ValueError: shape or dtype.
    """
    return return_rows(reduce_rows(expert_out, handle, weighted=weighted), handle.received)


def send_tokens(
    x: Tensor,
    expert_ids: Tensor,
    probs: Tensor,
    group: dist.ProcessGroup,
    num_experts: int,
    *,
    payload: str | None = None,
    etp: int = 1,
) -> ReceivedTokens:
    """The first half of dispatch, with all of its communication: tokens to the ranks of their experts."""
    world = dist.get_world_size(group)
    wire_dtype = _check(x, expert_ids, probs, num_experts, payload, world, etp)
    local_experts = num_experts * etp // world
    holders = expert_ids.div(local_experts, rounding_mode="floor")  # -1 stays -1
    ranks = torch.cat([torch.where(holders < 0, holders, holders * etp + part) for part in range(etp)], 1)
    sizes = (x.shape[1], expert_ids.shape[1], num_experts, _payload_code(payload, x.dtype), probs.dtype.itemsize)
    transport = plan_transport(ranks, group, sizes)
    sent = _SendTokens.apply(x.to(wire_dtype), probs, expert_ids, transport, payload == "fp8")
    received, received_probs, ids, anchor, codes, scale = sent
    ids = ids - dist.get_rank(group) // etp * local_experts
    ids.masked_fill_((ids < 0) | (ids >= local_experts), -1)
    return ReceivedTokens(transport, received.to(x.dtype), ids, received_probs, anchor, wire_dtype, codes, scale)


def expand(received: ReceivedTokens, local_experts: int, *, capacity: int | None = None, align: int = 1) -> Dispatched:
    """The second half of dispatch: each received token at the rows of its local experts."""
    rows, row_probs, row_map, offsets = moe_permute(
        received.x, received.expert_ids, received.probs, num_experts=local_experts, capacity=capacity, align=align
    )
    return Dispatched(rows, row_probs, offsets, DispatchHandle(received, row_map, rows.shape[0]))


def reduce_rows(expert_out: Tensor, handle: DispatchHandle, *, weighted: bool = True) -> Tensor:
    """The first half of combine: [R, H] -> [N, H], this rank's part of each received token's sum."""
    if expert_out.dim() != 2 or expert_out.shape[0] != handle.num_rows:
        raise ValueError(
            f"combine: expert_out is {list(expert_out.shape)}; it must be [{handle.num_rows}, H], a row for each of"
            " dispatch's"
        )
    return moe_unpermute(expert_out, handle.row_map, handle.received.probs if weighted else None)


def return_rows(parts: Tensor, received: ReceivedTokens) -> Tensor:
    """The second half of combine, with all of its communication: [N, H] -> [T, H], summed over the ranks."""
    out = _ReturnRows.apply(parts.to(received.wire_dtype), received.anchor, received.transport)
    return out.to(parts.dtype)


class _SendTokens(torch.autograd.Function):
    """Tokens and their weights to the ranks of their experts; gradients come back over the same transport."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, probs: Tensor, expert_ids: Tensor, transport: TokenTransport, quantize: bool
    ) -> tuple[Tensor | None, ...]:
        ctx.transport, ctx.dtypes = transport, (x.dtype, probs.dtype)
        beside = [probs, expert_ids.to(torch.int32)]
        codes = scale = None
        if quantize:
            codes, scale, received_probs, ids = transport.send([*quantize_fp8(x), *beside])
            received = dequantize_fp8(codes, scale, dtype=x.dtype)
            ctx.mark_non_differentiable(codes, scale)
        else:
            received, received_probs, ids = transport.send([x, *beside])
        ids = ids.to(torch.int64)
        ctx.mark_non_differentiable(ids)
        return received, received_probs, ids, probs.new_zeros(()), codes, scale

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_x: Tensor, grad_probs: Tensor, *unused: Tensor) -> tuple[Tensor | None, ...]:
        # Both travel whichever is needed: the ranks must agree on the message.
        grads = ctx.transport.send_back([grad_x, grad_probs])
        return *(ctx.transport.sum_rows(grad) for grad in grads), None, None, None


class _ReturnRows(torch.autograd.Function):
    """Rows of the experts' ranks to their tokens, summed there; the gradient goes out like tokens."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, anchor: Tensor, transport: TokenTransport) -> Tensor:
        ctx.transport = transport
        (rows,) = transport.send_back([parts])
        return transport.sum_rows(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, None]:
        (grad_parts,) = ctx.transport.send([grad_out])
        return grad_parts, grad_out.new_zeros(()), None


def _payload_code(payload: str | None, dtype: torch.dtype) -> int:
    """A number for what travels, to compare between ranks: negative bytes of an element for FP8."""
    return -dtype.itemsize if payload == "fp8" else PAYLOADS.get(payload or "", dtype).itemsize


def _check(
    x: Tensor, expert_ids: Tensor, probs: Tensor, num_experts: int, payload: str | None, world: int, etp: int
) -> torch.dtype:
    """Refuses what cannot be dispatched; the dtype in which rows and gradients travel."""
    if x.dim() != 2 or expert_ids.dim() != 2 or expert_ids.shape[0] != x.shape[0] or probs.shape != expert_ids.shape:
        raise ValueError(
            f"dispatch: x is {list(x.shape)}, expert_ids {list(expert_ids.shape)} and probs {list(probs.shape)};"
            " they must be [T, H], [T, K] and [T, K]"
        )
    if x.dtype not in PAYLOADS.values() or expert_ids.dtype != torch.int64:
        raise ValueError(
            f"dispatch: x is {x.dtype} and expert_ids {expert_ids.dtype}; they must be float32, bfloat16 or float64,"
            " and int64"
        )
    wanted = torch.float64 if x.dtype == torch.float64 else torch.float32
    if probs.dtype != wanted:
        raise ValueError(f"dispatch: probs is {probs.dtype}; beside tokens of {x.dtype} it must be {wanted}")
    if world % etp or num_experts % (world // etp):
        raise ValueError(
            f"dispatch: {num_experts} experts on {world} ranks with etp {etp}; ranks / etp must divide the experts"
        )
    if expert_ids.numel() and not (-1 <= int(expert_ids.min()) and int(expert_ids.max()) < num_experts):
        raise ValueError(
            f"dispatch: expert_ids holds {int(expert_ids.min())} to {int(expert_ids.max())}; it must hold -1 (none) to"
            f" {num_experts - 1}"
        )
    if payload == "fp8" and x.dtype == torch.float64:
        raise ValueError("dispatch: payload is 'fp8' and x float64; it must be float32 or bfloat16")
    if payload not in (None, "fp8", *PAYLOADS):
        raise ValueError(
            f"dispatch: payload is {payload!r}; it must be 'fp8', {', '.join(map(repr, PAYLOADS))} or None"
        )
    return x.dtype if payload in (None, "fp8") else PAYLOADS[payload or ""]
