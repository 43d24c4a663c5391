"""policy_loss, clip with k3 and token_mean, forward and backward, against the same loss in torch without metrics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from grpo_mc import ops
from grpo_mc.ops import reference
from grpo_mc.ops.bench.timing import Case, on_one_thread, relative_error

TOKENS = 65536
OPTIONS: dict[str, Any] = {
    "kind": "clip",
    "clip_low": 0.2,
    "clip_high": 0.28,
    "kl": "k3",
    "beta": 0.04,
    "aggregation": "token_mean",
}


def torch_loss(logprobs: Tensor, old: Tensor, ref: Tensor, advantages: Tensor, mask: Tensor, count: float) -> Tensor:
    """What a trainer writes in torch, no metrics."""
    ratio = torch.exp(logprobs - old)
    token_loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)
    d = ref - logprobs
    token_loss = token_loss + 0.04 * (torch.exp(d) - d - 1)
    return (token_loss * mask).sum() / count


def cases(device: str = "cpu") -> Iterator[Case]:
    """Rows: against torch without metrics, the reference, and one thread."""
    generator = torch.Generator(device).manual_seed(0)
    old = torch.randn(TOKENS, generator=generator, device=device) - 3
    leaf = (old + 0.2 * torch.randn(TOKENS, generator=generator, device=device)).requires_grad_()
    ref = old + 0.2 * torch.randn(TOKENS, generator=generator, device=device)
    advantages = torch.randn(TOKENS, generator=generator, device=device)
    mask = torch.rand(TOKENS, generator=generator, device=device) < 0.9
    count = float(mask.sum())

    def step(function: Any, logprobs: Tensor = leaf) -> tuple[Tensor, ...]:
        inputs = [x.to(logprobs.dtype) for x in (old, advantages)]
        result = function(logprobs, *inputs, mask, ref_logprobs=ref.to(logprobs.dtype), denominator=count, **OPTIONS)
        return result.loss, *torch.autograd.grad(result.loss, logprobs), *result.metrics.values()

    def ours(_: None) -> tuple[Tensor, ...]:
        return step(ops.policy_loss)

    def eager(_: None) -> tuple[Tensor, ...]:
        loss = torch_loss(leaf, old, ref, advantages, mask, count)
        return loss, *torch.autograd.grad(loss, leaf)

    def error(result: tuple[Tensor, ...]) -> float:
        wide = leaf.detach().double().requires_grad_()
        return relative_error(list(result[:2]), list(step(reference.policy_loss, wide))[:2])

    for name, baseline in (
        ("torch eager without metrics", eager),
        ("reference with metrics", lambda _: step(reference.policy_loss)),
        ("ours on 1 thread", on_one_thread(ours)),
    ):
        yield Case(
            op="policy_loss",
            device=device,
            shape={"T": TOKENS},
            dtype="float32",
            baseline_name=name,
            ours=ours,
            baseline=baseline,
            error=error,
            num_bytes=TOKENS * (4 * 4 + 1 + 4 + 8),  # inputs and mask, the gradient, and its scaling in backward
        )
