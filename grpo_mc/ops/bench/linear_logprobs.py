"""linear_logprobs with entropy, forward and backward, against the chunked form that trainers write in torch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from grpo_mc import ops
from grpo_mc.ops import reference
from grpo_mc.ops.bench.timing import Case, on_one_thread, relative_error

TOKENS, HIDDEN, VOCABULARY, CHUNKS = 512, 1024, 49152, 4
Result = tuple[Tensor, Tensor, Tensor, Tensor]


def chunk(x: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Some tokens' log-probs and entropies by way of their logits."""
    logits = x @ weight.t()
    lse = logits.logsumexp(-1)
    entropy = lse - (torch.softmax(logits, -1) * logits).sum(-1)
    return logits.gather(1, targets[:, None]).squeeze(1) - lse, entropy


def torch_chunked(x: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """A chunk of the tokens at a time, whose logits backward computes again."""
    parts = [
        checkpoint(chunk, a, weight, b, use_reentrant=False)
        for a, b in zip(x.chunk(CHUNKS), targets.chunk(CHUNKS), strict=True)
    ]
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def cases(device: str = "cpu") -> Iterator[Case]:
    """Rows: against the chunked form and the plain one, and over threads."""
    draw = torch.Generator(device).manual_seed(0)
    x = torch.randn(TOKENS, HIDDEN, generator=draw, device=device).requires_grad_()
    weight = (torch.randn(VOCABULARY, HIDDEN, generator=draw, device=device) / HIDDEN**0.5).requires_grad_()
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=draw, device=device)
    factor = torch.randn(TOKENS, generator=draw, device=device)

    def step(logprobs: Tensor, entropy: Tensor) -> Result:
        x.grad = weight.grad = None
        (logprobs * factor + 0.01 * entropy).sum().backward()
        assert x.grad is not None and weight.grad is not None
        return logprobs.detach(), entropy.detach(), x.grad, weight.grad

    def ours(_: None) -> Result:
        return step(*ops.linear_logprobs(x, weight, targets, with_entropy=True))

    def chunked(_: None) -> Result:
        return step(*torch_chunked(x, weight, targets))

    def plain(_: None) -> Result:
        return step(*chunk(x, weight, targets))

    exact = [tensor.clone() for tensor in step(*reference.linear_logprobs(x, weight, targets, with_entropy=True))]

    def error(result: Result) -> float:
        return relative_error(list(result), exact)

    others = (
        ("torch, chunks computed again", chunked),
        ("torch, all logits", plain),
        ("ours on 1 thread", on_one_thread(ours)),
    )
    for name, other in others:
        yield Case(
            op="linear_logprobs",
            device=device,
            shape={"T": TOKENS, "H": HIDDEN, "V": VOCABULARY},
            dtype="float32",
            baseline_name=name,
            ours=ours,
            baseline=other,
            error=error,
            flops=8.0 * TOKENS * HIDDEN * VOCABULARY,
        )
