"""quantize_int8 with error feedback against the same steps in torch, eager and compiled, on a bucket of gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from grpo_mc import ops
from grpo_mc.ops import reference
from grpo_mc.ops.bench.quantize_int4 import BLOCK, ENTRIES, feedback_codes
from grpo_mc.ops.bench.timing import Case, relative_error
from grpo_mc.ops.int4 import int4_error


def torch_quantize(x: Tensor, error_codes: Tensor, error_scale: Tensor) -> tuple[Tensor, Tensor]:
    """What a user writes; the error state is replaced in place."""
    q, scale = feedback_codes(x, error_codes, error_scale, 127)
    return q.to(torch.int8), scale


def cases(device: str = "cpu") -> Iterator[Case]:
    """Rows: against eager and compiled torch."""
    x = torch.randn(ENTRIES, generator=torch.Generator(device).manual_seed(0), device=device)
    error, few = int4_error(x, block=BLOCK), x[: 1 << 16]

    def wrong(_: tuple[Tensor, Tensor]) -> float:
        """Of a part without feedback, since the state differs from run to run."""
        coded = (ops.quantize_int8(few, block=BLOCK), reference.quantize_int8(few, block=BLOCK))
        ours, theirs = (ops.dequantize_int8(*one, shape=few.shape) for one in coded)
        return relative_error([ours], [theirs])

    baselines: dict[str, Callable[..., Any]] = {
        "torch eager": torch_quantize,
        "torch.compile": torch.compile(torch_quantize),
    }
    for name, baseline in baselines.items():
        yield Case(
            op="quantize_int8",
            device=device,
            shape={"n": ENTRIES, "block": BLOCK},
            dtype="float32",
            baseline_name=name,
            ours=lambda _: ops.quantize_int8(x, block=BLOCK, error=error),
            baseline=lambda _, run=baseline: run(x, *error),  # type: ignore[misc]
            error=wrong,
            num_bytes=x.nbytes + 3 * ENTRIES,
        )
