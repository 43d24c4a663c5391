"""quantize_int4 with error feedback against the same steps in torch, eager and compiled, on a bucket of gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from grpo_mc import ops
from grpo_mc.ops import reference
from grpo_mc.ops.bench.timing import Case, on_one_thread, relative_error
from grpo_mc.ops.int4 import Int4Error, int4_error

ENTRIES, BLOCK = 1 << 26, 128


def feedback_codes(x: Tensor, error_codes: Tensor, error_scale: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Whole numbers [n / BLOCK, BLOCK] and scales; the error state is replaced in place."""
    whole = x.view(-1, BLOCK) + error_codes.float() * error_scale[:, None]
    scale = (whole.abs().amax(1) / levels).clamp_min(2.0**-126)
    q = (whole * (1.0 / scale)[:, None]).round().clamp(-levels, levels)
    rest = whole - q * scale[:, None]
    rest_scale = (rest.abs().amax(1) / 127.0).clamp_min(2.0**-126)
    error_codes.copy_((rest * (1.0 / rest_scale)[:, None]).round().clamp(-127, 127))
    error_scale.copy_(rest_scale)
    return q, scale


def torch_quantize(x: Tensor, error_codes: Tensor, error_scale: Tensor) -> tuple[Tensor, Tensor]:
    """What a user writes."""
    q, scale = feedback_codes(x, error_codes, error_scale, 7)
    nibbles = (q + 8).to(torch.uint8)
    return nibbles[:, 0::2] | (nibbles[:, 1::2] << 4), scale


def cases(device: str = "cpu") -> Iterator[Case]:
    """Rows: plain, with the transform, and with random rounding; the plain one against eager and compiled torch."""
    x = torch.randn(ENTRIES, generator=torch.Generator(device).manual_seed(0), device=device)
    error = int4_error(x, block=BLOCK)
    compiled = torch.compile(torch_quantize)

    def case(name: str, ours: Callable[[Any], Any], baseline: Callable[[Any], Any], **options: Any) -> Case:
        few = x[: 1 << 16]

        def wrong(_: tuple[Tensor, Tensor]) -> float:
            """Of a part without feedback, since the state differs from run to run."""
            got = ops.quantize_int4(few, block=BLOCK, **options)
            want = reference.quantize_int4(few, block=BLOCK, **options)
            values = [ops.dequantize_int4(*coded, shape=few.shape) for coded in (got, want)]
            return relative_error(values[:1], values[1:])

        return Case(
            op="quantize_int4",
            device=device,
            shape={"n": ENTRIES, "block": BLOCK, **{key: 1 for key in options}},
            dtype="float32",
            baseline_name=name,
            ours=ours,
            baseline=baseline,
            error=wrong,
            num_bytes=x.nbytes + 2 * ENTRIES + ENTRIES / 2,
        )

    def run(state: Int4Error = error, **options: Any) -> Callable[[Any], Any]:
        return lambda _: ops.quantize_int4(x, block=BLOCK, error=state, **options)

    plain = run()
    yield case("torch eager", plain, lambda _: torch_quantize(x, *error))
    yield case("torch.compile", plain, lambda _: compiled(x, *error))
    yield case("ours on 1 thread", plain, on_one_thread(plain))
    variants: tuple[dict[str, Any], ...] = ({"hadamard": True}, {"rounding": "stochastic"})
    for options in variants:
        yield case("ours without", run(**options), plain, **options)
