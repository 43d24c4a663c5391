"""quantize_fp8 against torch's operations, eager and compiled, at the size of a layer's activations."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from grpo_mc import ops
from grpo_mc.ops import reference
from grpo_mc.ops.bench.timing import Case, on_one_thread, relative_error

ROWS, COLUMNS = 4096, 7168
TILES = ((1, 128), (128, 1), (128, 128))


def torch_quantize(x: Tensor, tile: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """What a user writes: amax over a view of the tiles, scale, cast. Sizes are multiples of 128."""
    rows, columns = x.shape
    tiles = x.float().view(rows // tile[0], tile[0], columns // tile[1], tile[1])
    scale = (tiles.abs().amax((1, 3), keepdim=True) / 448.0).clamp_min(2.0**-126)
    codes = (tiles * (1.0 / scale)).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    return codes.view(rows, columns), scale.view(scale.shape[0], scale.shape[2])


def cases(device: str = "cpu") -> Iterator[Case]:
    """Rows: three tiles against eager and compiled torch, and the scaling over threads."""
    x = torch.randn(ROWS, COLUMNS, generator=torch.Generator(device).manual_seed(0), device=device).bfloat16()
    compiled = torch.compile(torch_quantize)
    for tile in TILES:

        def ours(_: None, tile: tuple[int, int] = tile) -> tuple[Tensor, Tensor]:
            return ops.quantize_fp8(x, tile=tile)

        def eager(_: None, tile: tuple[int, int] = tile) -> tuple[Tensor, Tensor]:
            return torch_quantize(x, tile)

        def fused(_: None, tile: tuple[int, int] = tile) -> tuple[Tensor, Tensor]:
            return compiled(x, tile)

        def error(result: tuple[Tensor, Tensor], tile: tuple[int, int] = tile) -> float:
            codes, scale = reference.quantize_fp8(x, tile=tile)
            return relative_error([result[0].float(), result[1]], [codes.float(), scale])

        others = (("torch eager", eager), ("torch.compile", fused), ("ours on 1 thread", on_one_thread(ours)))
        for name, other in others:
            yield Case(
                op="quantize_fp8",
                device=device,
                shape={"M": ROWS, "K": COLUMNS, "tile_rows": tile[0], "tile_columns": tile[1]},
                dtype="bfloat16",
                baseline_name=name,
                ours=ours,
                baseline=other,
                error=error,
                num_bytes=x.nbytes + x.numel(),
            )
