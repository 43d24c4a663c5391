"""moe_unpermute, weighted and summed in float32 into given memory, against torch's index_add on bfloat16."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from grpo_mc import ops
from grpo_mc.ops import reference
from grpo_mc.ops.bench.moe_permute import EXPERTS, HIDDEN, TOKENS, TOP_K
from grpo_mc.ops.bench.timing import Case, on_one_thread, relative_error


def cases(device: str = "cpu") -> Iterator[Case]:
    """Rows: against index_add of weighted rows, against the same with sums in float32, and over threads."""
    draw = torch.Generator(device).manual_seed(0)
    expert_ids, probs = ops.moe_route(torch.randn(TOKENS, EXPERTS, generator=draw, device=device), top_k=TOP_K)
    x = torch.randn(TOKENS, HIDDEN, generator=draw, device=device).bfloat16()
    rows, row_probs, row_map, _ = ops.moe_permute(x, expert_ids, probs, num_experts=EXPERTS)
    tokens = expert_ids.flatten().sort(stable=True).indices // TOP_K
    exact = reference.moe_unpermute(rows.float(), row_map, probs)
    out = torch.empty_like(x)

    def ours(_: None) -> Tensor:
        return ops.moe_unpermute(rows, row_map, probs, out=out)

    def index_add(_: None) -> Tensor:
        return out.zero_().index_add_(0, tokens, rows)

    def weighted(_: None) -> Tensor:
        total = torch.zeros(TOKENS, HIDDEN, device=device)
        return total.index_add_(0, tokens, rows.float() * row_probs[:, None]).bfloat16()

    def error(result: Tensor) -> float:
        return relative_error([result], [exact])

    others = (
        ("index_add on bfloat16, without weights", index_add),
        ("index_add in float32, weighted", weighted),
        ("ours on 1 thread", on_one_thread(ours)),
    )
    for name, other in others:
        yield Case(
            op="moe_unpermute",
            device=device,
            shape={"T": TOKENS, "K": TOP_K, "E": EXPERTS, "H": HIDDEN},
            dtype="bfloat16",
            baseline_name=name,
            ours=ours,
            baseline=other,
            error=error,
            num_bytes=rows.nbytes + out.nbytes,
        )
