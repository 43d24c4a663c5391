"""token_logprobs with entropy, forward and backward, against log_softmax + gather + entropy in torch.

Three of our rows write a fresh gradient; two overwrite the logits (inplace_backward), where the copy that restores the
logits before each run is not timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from grpo_mc import ops
from grpo_mc.ops import reference
from grpo_mc.ops.bench.timing import Case, on_one_thread, relative_error

TOKENS, VOCAB = 512, 151936
CHECKED_TOKENS = 8
"""Rows compared with the float64 reference: the whole of it would take gigabytes."""


def torch_logprobs(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """What a trainer writes in torch: float32 log-softmax, gather, entropy."""
    log_p = torch.log_softmax(logits.float(), dim=-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return log_p.gather(1, targets[:, None]).squeeze(1), entropy


def step(function: Callable[[Tensor, Tensor], Any], targets: Tensor, grads: tuple[Tensor, Tensor]) -> Callable:
    """Forward and backward with fixed gradients; returns log-probs, entropy and the gradient of the logits."""

    def run(leaf: Tensor) -> tuple[Tensor, ...]:
        outputs = function(leaf, targets)
        return (*outputs, *torch.autograd.grad(outputs, leaf, grads))

    return run


def cases(device: str = "cpu") -> Iterator[Case]:
    """Rows: float32 and bfloat16, against eager and torch.compile, and the scaling over threads."""
    generator = torch.Generator(device).manual_seed(0)
    targets = torch.randint(VOCAB, (TOKENS,), generator=generator, device=device)
    grads = (
        torch.randn(TOKENS, generator=generator, device=device),
        torch.randn(TOKENS, generator=generator, device=device),
    )
    compiled = torch.compile(torch_logprobs)
    for dtype in (torch.float32, torch.bfloat16):
        logits = (torch.randn(TOKENS, VOCAB, generator=generator, device=device) * 2).to(dtype)
        buffer = torch.empty_like(logits)

        def prepare(logits: Tensor = logits, buffer: Tensor = buffer) -> Tensor:
            return buffer.copy_(logits).detach().requires_grad_()

        def error(result: tuple[Tensor, ...], logits: Tensor = logits) -> float:
            return _error(result, logits, targets, grads)

        for inplace, name, baseline in (
            (False, "torch eager", torch_logprobs),
            (False, "torch.compile", compiled),
            (True, "torch eager, ours inplace_backward", torch_logprobs),
            (True, "torch.compile, ours inplace_backward", compiled),
            (True, "ours on 1 thread, inplace_backward", None),
        ):
            ours = step(_ours(inplace), targets, grads)
            yield Case(
                op="token_logprobs",
                device=device,
                shape={"T": TOKENS, "V": VOCAB},
                dtype=str(dtype).removeprefix("torch."),
                baseline_name=name,
                ours=ours,
                baseline=on_one_thread(ours) if baseline is None else step(baseline, targets, grads),
                error=error,
                prepare=prepare,
                num_bytes=3 * logits.numel() * logits.element_size(),  # read, read, write
            )


def _ours(inplace: bool) -> Callable[[Tensor, Tensor], Any]:
    return lambda logits, targets: ops.token_logprobs(logits, targets, with_entropy=True, inplace_backward=inplace)


def _error(result: tuple[Tensor, ...], logits: Tensor, targets: Tensor, grads: tuple[Tensor, Tensor]) -> float:
    leaf = logits[:CHECKED_TOKENS].double().requires_grad_()
    outputs = reference.token_logprobs(leaf, targets[:CHECKED_TOKENS], with_entropy=True)
    assert isinstance(outputs, tuple)
    expected = [*outputs, *torch.autograd.grad(outputs, leaf, [g[:CHECKED_TOKENS].double() for g in grads])]
    return relative_error([x[:CHECKED_TOKENS] for x in result], expected)
