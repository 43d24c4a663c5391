"""rms_norm against torch's, at the widths and batch sizes of a decoding step."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from grpo_mc import ops
from grpo_mc.ops import reference
from grpo_mc.ops.bench.timing import Case, on_one_thread, relative_error

EPS = 1e-5
SHAPES = tuple({"T": rows, "H": width} for rows in (1, 16, 64, 256) for width in (576, 2048))


def cases(device: str = "cpu") -> Iterator[Case]:
    """Rows: two widths at four batch sizes, and the scaling over threads."""
    generator = torch.Generator(device).manual_seed(0)
    for shape in SHAPES:
        rows, width = shape.values()
        x, weight = (
            torch.randn(rows, width, generator=generator, device=device),
            torch.rand(width, generator=generator, device=device),
        )

        def ours(_: None, x: Tensor = x, weight: Tensor = weight) -> Tensor:
            return ops.rms_norm(x, weight, EPS)

        def torchs(_: None, x: Tensor = x, weight: Tensor = weight) -> Tensor:
            return F.rms_norm(x, (x.shape[-1],), weight, EPS)

        def error(result: Tensor, x: Tensor = x, weight: Tensor = weight) -> float:
            return relative_error([result], [reference.rms_norm(x.double(), weight.double(), EPS)])

        for name, other in (("torch rms_norm", torchs), ("ours on 1 thread", on_one_thread(ours))):
            yield Case(
                op="rms_norm",
                device=device,
                shape=shape,
                dtype="float32",
                baseline_name=name,
                ours=ours,
                baseline=other,
                error=error,
                num_bytes=2 * x.nbytes + weight.nbytes,
            )
