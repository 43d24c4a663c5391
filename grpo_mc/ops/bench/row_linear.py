"""row_linear against BLAS, over more weights than the caches hold, as a decoding step meets them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from grpo_mc import ops
from grpo_mc.ops import reference
from grpo_mc.ops.bench.timing import Case, on_one_thread, relative_error

# SmolLM2-135M: attention in, MLP in, MLP out, output layer.
SHAPES = tuple(
    {"M": rows, "N": columns, "K": depth}
    for rows in (1, 8, 32, 64, 128)
    for columns, depth in ((960, 576), (3072, 576), (576, 1536), (49152, 576))
)
WORKING_SET_BYTES = 128 << 20


def cases(device: str = "cpu") -> Iterator[Case]:
    """Rows: four layers at five batch sizes, and the scaling over threads."""
    generator = torch.Generator(device).manual_seed(0)
    for shape in SHAPES:
        rows, columns, depth = shape.values()
        copies = max(1, WORKING_SET_BYTES // (4 * columns * depth))
        weights = [torch.randn(columns, depth, generator=generator, device=device) for _ in range(copies)]
        x = torch.randn(rows, depth, generator=generator, device=device)

        def ours(_: None, x: Tensor = x, weights: list[Tensor] = weights) -> Tensor:
            return [ops.row_linear(x, weight) for weight in weights][0]

        def blas(_: None, x: Tensor = x, weights: list[Tensor] = weights) -> Tensor:
            return [torch.matmul(x, weight.t()) for weight in weights][0]

        def error(result: Tensor, x: Tensor = x, weights: list[Tensor] = weights) -> float:
            return relative_error([result], [reference.row_linear(x.double(), weights[0].double())])

        for name, other in (("torch.matmul", blas), ("ours on 1 thread", on_one_thread(ours))):
            yield Case(
                op="row_linear",
                device=device,
                shape=shape,
                dtype="float32",
                baseline_name=name,
                ours=ours,
                baseline=other,
                error=error,
                flops=2 * rows * columns * depth * copies,
            )
