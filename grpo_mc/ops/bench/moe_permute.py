"""moe_permute into given memory against torch's index_select, at a training batch of a mid-sized model."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from grpo_mc import ops
from grpo_mc.ops import reference
from grpo_mc.ops.bench.timing import Case, on_one_thread, relative_error

TOKENS, TOP_K, EXPERTS, HIDDEN = 4096, 8, 64, 2048


def cases(device: str = "cpu") -> Iterator[Case]:
    """Rows: against index_select of the rows in their order, a plain copy of as many bytes, and over threads."""
    draw = torch.Generator(device).manual_seed(0)
    x = torch.randn(TOKENS, HIDDEN, generator=draw, device=device).bfloat16()
    expert_ids, probs = ops.moe_route(torch.randn(TOKENS, EXPERTS, generator=draw, device=device), top_k=TOP_K)
    order = expert_ids.flatten().sort(stable=True).indices // TOP_K
    out = torch.empty(TOKENS * TOP_K, HIDDEN, dtype=x.dtype, device=device)
    source = torch.empty_like(out).copy_(x.repeat(TOP_K, 1))

    def ours(_: None) -> Tensor:
        return ops.moe_permute(x, expert_ids, probs, num_experts=EXPERTS, out=out)[0]

    def index_select(_: None) -> Tensor:
        return torch.index_select(x, 0, order, out=out)

    def copy(_: None) -> Tensor:
        return out.copy_(source)

    def error(result: Tensor) -> float:
        return relative_error([result], [x[order]])

    few = slice(0, 64)  # the reference loops in Python
    exact = reference.moe_permute(x[few], expert_ids[few], probs[few], num_experts=EXPERTS)[0]
    assert torch.equal(exact, ops.moe_permute(x[few], expert_ids[few], probs[few], num_experts=EXPERTS)[0])
    others = (
        ("index_select", index_select),
        ("copy of the result's bytes", copy),
        ("ours on 1 thread", on_one_thread(ours)),
    )
    for name, other in others:
        yield Case(
            op="moe_permute",
            device=device,
            shape={"T": TOKENS, "K": TOP_K, "E": EXPERTS, "H": HIDDEN},
            dtype="bfloat16",
            baseline_name=name,
            ours=ours,
            baseline=other,
            error=error,
            num_bytes=x.nbytes + out.nbytes,
        )
