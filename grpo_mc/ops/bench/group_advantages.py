"""group_advantages against torch on a [groups, group_size] view, which needs whole groups in order and no masks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from grpo_mc import ops
from grpo_mc.ops import reference
from grpo_mc.ops.bench.timing import Case, relative_error

GROUPS, GROUP_SIZE = 512, 16


def torch_advantages(rewards: Tensor) -> Tensor:
    """Mean and population std of a rectangular view."""
    view = rewards.view(GROUPS, GROUP_SIZE).double()
    centered = view - view.mean(1, keepdim=True)
    return (centered / (view.std(1, correction=0, keepdim=True) + 1e-4)).flatten().float()


def cases(device: str = "cpu") -> Iterator[Case]:
    """Rows: against torch on a rectangle, and the reference."""
    generator = torch.Generator(device).manual_seed(0)
    rewards = torch.rand(GROUPS * GROUP_SIZE, generator=generator, device=device)
    ids = torch.arange(GROUPS, device=device).repeat_interleave(GROUP_SIZE)
    for name, baseline in (
        ("torch on a rectangle", lambda _: torch_advantages(rewards)),
        ("reference", lambda _: reference.group_advantages(rewards, ids)),
    ):
        yield Case(
            op="group_advantages",
            device=device,
            shape={"N": len(rewards), "groups": GROUPS},
            dtype="float32",
            baseline_name=name,
            ours=lambda _: ops.group_advantages(rewards, ids),
            baseline=baseline,
            error=lambda result: relative_error([result], [reference.group_advantages(rewards.double(), ids)]),
            num_bytes=rewards.numel() * 16,
        )
