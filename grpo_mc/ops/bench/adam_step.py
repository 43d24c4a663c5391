"""adam_step against torch's fused AdamW, and against all the passes over a tensor that it takes the place of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from grpo_mc import ops
from grpo_mc.ops import reference
from grpo_mc.ops.adam import STATE_BITS, AdamState, adam_state
from grpo_mc.ops.bench.timing import Case, on_one_thread, relative_error

ENTRIES = 1 << 26
GRAD_SCALE, CLIP_COEF = 8.0, 0.5
NUMBERS: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.1}


class Steps:
    """One tensor and its gradient, stepped again and again."""

    def __init__(self, device: str) -> None:
        draw = torch.Generator(device).manual_seed(0)
        self.params, self.grads = (torch.randn(ENTRIES, generator=draw, device=device) for _ in range(2))
        self.out = torch.empty(ENTRIES, dtype=torch.bfloat16, device=device)
        self.parameter = torch.nn.Parameter(self.params.clone())
        self.parameter.grad = torch.randn(ENTRIES, generator=draw, device=device)
        self.adamw = torch.optim.AdamW([self.parameter], fused=True, **NUMBERS)

    def ours(self, state: AdamState, _: Any, **options: Any) -> None:
        ops.adam_step(self.params, self.grads, state, step=10, **NUMBERS, **options)

    def torch_adamw(self, _: Any) -> None:
        self.adamw.step()

    def torch_passes(self, _: Any) -> None:
        """Unscale, clip, step, copy in bfloat16: what a training loop without a fused step does."""
        assert self.parameter.grad is not None
        self.parameter.grad.mul_(1 / GRAD_SCALE)
        self.parameter.grad.mul_(CLIP_COEF)
        self.adamw.step()
        self.out.copy_(self.parameter.detach())


def parts(state: AdamState) -> list[Tensor]:
    return [part for part in state if part is not None]


def wrong(bits: int, _: Any) -> float:
    """How far a step of a smaller tensor is from the reference's."""
    written = []
    for step in (ops.adam_step, reference.adam_step):
        draw = torch.Generator().manual_seed(1)
        params = torch.randn(1 << 16, generator=draw)
        state = adam_state(params, bits=bits)
        step(params, torch.randn(1 << 16, generator=draw), state, step=1, **NUMBERS)
        written.append([params, *parts(state)])
    return relative_error(*written)


def cases(device: str = "cpu") -> Iterator[Case]:
    """Rows: the step alone with states in 32, 8 and 4 bits, and in 32 with everything that goes along."""
    steps = Steps(device)

    def case(
        name: str, baseline: Callable[[Any], None], *, bits: int = 32, ours: Callable[[Any], None], copy: bool = False
    ) -> Case:
        state_bytes = sum(part.nbytes for part in parts(adam_state(steps.params[:128], bits=bits))) / 128
        return Case(
            op="adam_step",
            device=device,
            shape={"n": ENTRIES, "bits": bits, "copy": int(copy)},
            dtype="float32",
            baseline_name=name,
            ours=ours,
            baseline=baseline,
            error=partial(wrong, bits),
            num_bytes=(12 + 2 * state_bytes + 2 * copy) * ENTRIES,
        )

    for bits in STATE_BITS:
        alone = partial(steps.ours, adam_state(steps.params, bits=bits))
        yield case("torch AdamW(fused=True)", steps.torch_adamw, bits=bits, ours=alone)
        yield case("ours on 1 thread", on_one_thread(alone), bits=bits, ours=alone)
    state = adam_state(steps.params)
    with_all = partial(steps.ours, state, out_bf16=steps.out, grad_scale=GRAD_SCALE, clip_coef=CLIP_COEF)
    yield case("torch unscale, clip, AdamW(fused=True), bfloat16 copy", steps.torch_passes, ours=with_all, copy=True)
