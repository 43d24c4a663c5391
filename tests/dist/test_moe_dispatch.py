"""Dispatch and combine over real ranks against a layer computed token by token in one process."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_mc.megatron.moe_dispatch import PAYLOADS
from grpo_mc.ops import dequantize_fp8, quantize_fp8
from helpers.compare import assert_close
from helpers.moe_layer import RankTokens, expected_rows, layer_output
from helpers.processes import run_distributed

pytestmark = pytest.mark.dist

WORLDS = (1, 2, 3, 4)
LOCAL_EXPERTS = 2


@dataclass(frozen=True)
class Case:
    """What every rank dispatches."""

    ids: str = "random"
    tokens: tuple[int, ...] = (5, 8, 3, 7)
    hidden: int = 24
    top_k: int = 2
    payload: str | None = None
    dtype: torch.dtype = torch.float64
    weighted: bool = True
    etp: int = 1
    options: dict[str, Any] = field(default_factory=dict)


CASES = {
    "ordinary": Case(),
    "top 1": Case(top_k=1),
    "top 8, more than there are experts here": Case(top_k=8, ids="repeated"),
    "some without": Case(ids="holes"),
    "all without": Case(ids="none"),
    "no tokens on the first rank": Case(tokens=(0, 4, 6, 2)),
    "no tokens anywhere": Case(tokens=(0, 0, 0, 0)),
    "all to the last rank": Case(ids="last"),
    "both experts on one rank": Case(ids="pairs"),
    "the same expert twice": Case(ids="twice"),
    "weights applied by the experts": Case(weighted=False),
    "aligned": Case(options={"align": 4}),
    "capacity": Case(tokens=(9, 9, 9, 9), options={"capacity": 3}),
    "no capacity at all": Case(options={"capacity": 0}),
    "capacity, aligned": Case(tokens=(9, 9, 9, 9), ids="holes", options={"capacity": 3, "align": 8}),
    "float32": Case(dtype=torch.float32, hidden=7),
    "bfloat16, 2880": Case(dtype=torch.bfloat16, hidden=2880),
    "bfloat16, 7168": Case(dtype=torch.bfloat16, hidden=7168, tokens=(3, 0, 2, 1)),
    "float32 as bf16": Case(dtype=torch.float32, payload="bf16"),
    "float64 as fp32": Case(payload="fp32"),
    "fp8, 300": Case(dtype=torch.float32, payload="fp8", hidden=300),
    "fp8 of bfloat16, 24": Case(dtype=torch.bfloat16, payload="fp8", options={"align": 16}),
    "fp8, no tokens anywhere": Case(dtype=torch.float32, payload="fp8", tokens=(0, 0, 0, 0)),
    "experts in two parts": Case(etp=2),
    "experts in two parts, pairs": Case(etp=2, ids="pairs", options={"align": 4}),
}


def random_case(seed: int) -> Case:
    """Any shape, dtype, payload and option."""
    draw = random.Random(seed)
    dtype = draw.choice((torch.float64, torch.float32, torch.bfloat16))
    payloads = [None, EXACT_WIRE[dtype]] + ([] if dtype == torch.float64 else ["fp8", "bf16"])
    options = {"align": draw.choice((1, 2, 16)), "capacity": draw.choice((None, None, 2, 6))}
    return Case(
        ids=draw.choice(("repeated", "repeated", "holes", "last", "pairs", "twice")),
        tokens=tuple(draw.choice((0, 1, 2, 5, 17)) for _ in WORLDS), hidden=draw.choice((1, 3, 24, 129, 256)),
        payload=draw.choice(payloads), dtype=dtype, weighted=draw.random() < 0.7, etp=draw.choice((1, 1, 1, 2)),
        options=options,
    )  # fmt: skip


TOLERANCE = {"fp64": 1e-12, "fp32": 1e-6, "bf16": 2e-2}
"""Of sums and gradients, by the dtype of the tokens or, where it is narrower, of what travels."""
EXACT_WIRE = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16"}
CASES |= {f"random {seed}": random_case(seed) for seed in range(24)}


def as_received(x: Tensor, case: Case) -> Tensor:
    """Rows after their way in the case's payload."""
    if case.payload == "fp8":
        return dequantize_fp8(*quantize_fp8(x), dtype=x.dtype)
    return x.to(PAYLOADS[case.payload]).to(x.dtype) if case.payload else x


def fits(case: Case, world: int) -> bool:
    return world % case.etp == 0


def tokens_of(case: Case, world: int) -> list[RankTokens]:
    """Every rank's input, the same in every process."""
    draw = torch.Generator().manual_seed(world)
    num_experts, found = LOCAL_EXPERTS * world // case.etp, []
    for rank in range(world):
        shape = (case.tokens[rank], case.top_k)
        ids = torch.rand(case.tokens[rank], num_experts, generator=draw).argsort(1)[:, : case.top_k]
        if case.ids == "repeated":
            ids = torch.randint(num_experts, shape, generator=draw)
        elif case.ids == "holes":
            ids = torch.where(torch.rand(shape, generator=draw) < 0.5, -1, ids)
        elif case.ids == "none":
            ids = torch.full(shape, -1)
        elif case.ids == "last":
            ids = num_experts - 1 - torch.rand(*shape, generator=draw).argsort(1)
        elif case.ids == "pairs":
            ids = torch.randint(num_experts // 2, shape[:1], generator=draw)[:, None] * 2 + torch.tensor([1, 0])
        elif case.ids == "twice":
            ids = ids[:, :1].expand(shape)
        x = torch.randn(case.tokens[rank], case.hidden, generator=draw, dtype=torch.float64).to(case.dtype)
        probs = torch.rand(shape, generator=draw, dtype=torch.float64)
        probs = probs.to(torch.float64 if case.dtype == torch.float64 else torch.float32)
        found.append(RankTokens(x.requires_grad_(), ids.contiguous(), probs.requires_grad_()))
    return found


@functools.cache
def factor(expert: int, part: int, hidden: int) -> Tensor:
    draw = torch.Generator().manual_seed(1000 * part + expert)
    return torch.rand(hidden, generator=draw, dtype=torch.float64) * 2 - 1


def expert(number: int, part: int, rows: Tensor) -> Tensor:
    """Every expert and part has a function of its own, no row depends on another, and its own rounding is nothing."""
    return torch.tanh(rows.double() * factor(number, part, rows.shape[1])).to(rows.dtype)


def weights_of(out: Tensor, rank: int) -> Tensor:
    """Of the outputs in the loss, so that every gradient differs."""
    return torch.cos(torch.arange(out.numel(), dtype=torch.float64) * (rank + 1)).view(out.shape).to(out.dtype)


def one_layer(case: Case, group: Any) -> dict[str, Any]:
    """What this rank sees of a case: rows, sums, gradients, and how many rows left it."""
    import torch.distributed as dist

    from grpo_mc.megatron.moe_dispatch import combine, dispatch

    rank, world = dist.get_rank(group), dist.get_world_size(group)
    mine, num_experts = tokens_of(case, world)[rank], LOCAL_EXPERTS * world // case.etp
    rows, row_probs, offsets, handle = dispatch(
        mine.x, mine.expert_ids, mine.probs, group, num_experts,
        payload=case.payload, etp=case.etp, **case.options,
    )  # fmt: skip
    first, bounds = rank // case.etp * LOCAL_EXPERTS, offsets.tolist()
    outs = [expert(first + e, rank % case.etp, rows[bounds[e] : bounds[e + 1]]) for e in range(LOCAL_EXPERTS)]
    expert_out = torch.cat(outs)
    named = torch.zeros(len(rows), dtype=torch.bool)
    named[handle.row_map[handle.row_map >= 0]] = True
    expert_out = torch.where(named[:, None], expert_out, torch.nan)  # rows of padding may hold anything
    out = combine(expert_out, handle, weighted=case.weighted)
    (out * weights_of(out, rank)).sum().backward()
    found = {"rows": rows.detach(), "row_probs": row_probs.detach(), "offsets": bounds, "out": out.detach()}
    found |= {"grad_x": mine.x.grad, "grad_probs": mine.probs.grad, "sent": handle.received.transport.num_sent}
    if case.payload == "fp8":
        codes, scale = handle.quantized_rows()
        found["quantized"] = (codes.view(torch.uint8), scale)  # float8 does not pickle
    return found


def all_cases() -> dict[int, dict[str, Any]]:
    """Every case in groups of 1, 2, 3 and 4 of the four ranks."""
    import torch.distributed as dist

    found: dict[int, dict[str, Any]] = {}
    for world in WORLDS:
        group = dist.new_group(list(range(world)), timeout=timedelta(seconds=60))
        if dist.get_rank() < world:
            found[world] = {name: one_layer(case, group) for name, case in CASES.items() if fits(case, world)}
    return found


@functools.cache
def everything_run() -> list[dict[int, dict[str, Any]]]:
    return run_distributed(all_cases, max(WORLDS), timeout_s=120)


def ranks_of(world: int) -> list[dict[str, Any]]:
    """Results of the ranks of the group of this size."""
    return [found[world] for found in everything_run()[:world]]


def pairs() -> list[Any]:
    return [pytest.param(w, n, id=f"{w}-{n}") for w in WORLDS for n, c in CASES.items() if fits(c, w)]


@pytest.mark.parametrize(("world", "name"), pairs())
def test_experts_see_their_rows_in_the_documented_order(world: int, name: str) -> None:
    case = CASES[name]
    everything = tokens_of(case, world)
    for rank, results in enumerate(ranks_of(world)):
        found, first = results[name], rank // case.etp * LOCAL_EXPERTS
        capacity, align = case.options.get("capacity"), case.options.get("align", 1)
        rows, row_probs, offsets = expected_rows(everything, range(first, first + LOCAL_EXPERTS), capacity, align)
        assert found["offsets"] == offsets and found["rows"].dtype == case.dtype
        assert torch.equal(found["rows"], as_received(rows.detach(), case))
        assert torch.equal(found["row_probs"], row_probs)
        destinations = everything[rank].expert_ids.div(LOCAL_EXPERTS, rounding_mode="floor")
        assert found["sent"] == case.etp * sum(len(set(row) - {-1}) for row in destinations.tolist())


@pytest.mark.parametrize(("world", "name"), pairs())
def test_sums_and_gradients_are_those_of_one_process(world: int, name: str) -> None:
    case = CASES[name]
    everything = tokens_of(case, world)
    for tokens in everything:
        tokens.x = as_received(tokens.x.detach(), case).double().requires_grad_()
        tokens.probs = tokens.probs.detach().double().requires_grad_()
    num_experts = LOCAL_EXPERTS * world // case.etp
    capacity = case.options.get("capacity")
    outputs = layer_output(
        everything, num_experts, expert, parts=case.etp, capacity=capacity, weighted=case.weighted
    )
    loss = sum((out * weights_of(out, rank)).sum() for rank, out in enumerate(outputs))
    leaves = [leaf for tokens in everything for leaf in (tokens.x, tokens.probs)]
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    wire = case.payload if case.payload in TOLERANCE else EXACT_WIRE[case.dtype]  # fp8: sums and gradients do not
    tolerance = max(TOLERANCE[wire], TOLERANCE[EXACT_WIRE[case.dtype]])
    for rank, results in enumerate(ranks_of(world)):
        found = results[name]
        assert found["out"].dtype == case.dtype
        assert_close(found["out"], outputs[rank].detach(), tolerance, f"{name}: sums of rank {rank}")
        assert_close(found["grad_x"], gradients[2 * rank], tolerance, f"{name}: gradient of the tokens")
        assert_close(found["grad_probs"], gradients[2 * rank + 1], tolerance, f"{name}: gradient of the weights")
