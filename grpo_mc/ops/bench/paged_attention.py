"""paged_attention against what torch offers: gather the blocks, then scaled_dot_product_attention with a mask."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from grpo_mc import ops
from grpo_mc.ops import reference
from grpo_mc.ops.bench.timing import Case, on_one_thread, relative_error

BLOCK = 16
SHAPES = (
    {"B": 64, "Hq": 9, "Hkv": 3, "D": 64, "length": 152},  # SmolLM2-135M: 24 prompt tokens and 128 new ones
    {"B": 8, "Hq": 32, "Hkv": 8, "D": 128, "length": 2048},
)


def torch_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, tables: Tensor, lengths: Tensor, scale: float
) -> Tensor:
    """Gathers every row's blocks and runs torch's fused attention with a length mask."""
    rows, heads, dim = query.shape
    share = heads // key_cache.shape[2]

    def gather(cache: Tensor) -> Tensor:
        blocks = cache[tables.long()].flatten(1, 2)  # [B, M * block, Hkv, D]
        return blocks.transpose(1, 2).repeat_interleave(share, dim=1)

    mask = torch.arange(tables.shape[1] * key_cache.shape[1], device=tables.device) < lengths[:, None]
    attend = torch.nn.functional.scaled_dot_product_attention
    out = attend(query[:, :, None], gather(key_cache), gather(value_cache), attn_mask=mask[:, None, None], scale=scale)
    return out.squeeze(2)


def cases(device: str = "cpu") -> Iterator[Case]:
    """Rows: two shapes, float32 and bfloat16 caches, and the scaling over threads."""
    generator = torch.Generator(device).manual_seed(0)
    for shape in SHAPES:
        rows, heads, kv_heads, dim, length = shape.values()
        per_row = -(-length // BLOCK)
        order = torch.randperm(rows * per_row, generator=generator, device=device).int()
        tables, lengths = order.view(rows, per_row), torch.full((rows,), length, dtype=torch.int32, device=device)
        for dtype in (torch.float32, torch.bfloat16):
            query = torch.randn(rows, heads, dim, generator=generator, device=device).to(dtype)
            keys = torch.randn(rows * per_row, BLOCK, kv_heads, dim, generator=generator, device=device).to(dtype)
            values = torch.randn(rows * per_row, BLOCK, kv_heads, dim, generator=generator, device=device).to(dtype)
            inputs = (query, keys, values, tables, lengths)

            def ours(_: None, inputs: tuple[Tensor, ...] = inputs, dim: int = dim) -> Tensor:
                return ops.paged_attention(*inputs, scale=dim**-0.5)

            def baseline(_: None, inputs: tuple[Tensor, ...] = inputs, dim: int = dim) -> Tensor:
                query, keys, values, tables, lengths = inputs
                return torch_attention(query, keys, values, tables, lengths, dim**-0.5)

            def error(result: Tensor, inputs: tuple[Tensor, ...] = inputs, dim: int = dim) -> float:
                wide = [x.double() if x.is_floating_point() else x for x in inputs]
                return relative_error([result], [reference.paged_attention(*wide, scale=dim**-0.5)])

            for name, other in (("torch gather + sdpa", baseline), ("ours on 1 thread", on_one_thread(ours))):
                yield Case(
                    op="paged_attention",
                    device=device,
                    shape=shape,
                    dtype=str(dtype).removeprefix("torch."),
                    baseline_name=name,
                    ours=ours,
                    baseline=other,
                    error=error,
                    num_bytes=2 * rows * length * kv_heads * dim * keys.element_size(),
                )
