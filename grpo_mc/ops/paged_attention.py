"""Decode attention over a paged key-value cache: one new query per row, keys and values in fixed-size blocks.

    out[b, h] = softmax_i(scale * query[b, h] . key_i) value_i      i < lengths[b], key_i from head h // (Hq / Hkv)

The query heads that share a key-value head are computed together, so each key and value is loaded once for all of
them. The softmax runs over chunks of 128 positions in float32 (on a GPU of 512, side by side and merged in order),
whatever the block size, so the result of a row depends on its own tokens only: not on the other rows, the layout of
the blocks or the number of threads. Several rows may name the same block (the prompt shared by a group). There is no
gradient: the operator decodes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_mc.ops.device import check_devices
from grpo_mc.ops.loader import load

load()


def paged_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, block_tables: Tensor, lengths: Tensor, *, scale: float
) -> Tensor:
    """softmax(scale * q k) v for each row.

    Args:
        query: [B, Hq, D] float32 or bfloat16.
        key_cache: [N, block, Hkv, D] float32 or bfloat16, any strides with D adjacent. Hq is a multiple of Hkv.
        value_cache: [N, block, Hkv, D], dtype of key_cache.
        block_tables: [B, M] int32, cache block of each stretch of `block` positions; entries past
            ceil(length / block) are never read.
        lengths: [B] int32, cached positions of each row, the new token's own included; 0 gives a zero output.
        scale: factor on the scores, finite; usually 1 / sqrt(D).

    Returns:
        [B, Hq, D], dtype of query; computed in float32.

    Raises:
        ValueError: shapes or dtypes that do not fit, a length beyond M * block, a block outside the cache,
            a scale that is not finite, tensors on several devices. Tables and lengths on a GPU are not read back:
            there a row with such a length or block becomes NaN.
    """
    check_devices(
        "paged_attention", query=query, key_cache=key_cache, value_cache=value_cache, block_tables=block_tables,
        lengths=lengths,
    )  # fmt: skip
    return torch.ops.grpo_mc.paged_attention(query, key_cache, value_cache, block_tables, lengths, scale)


@torch.library.register_fake("grpo_mc::paged_attention")
def _fake(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, block_tables: Tensor, lengths: Tensor, scale: float
) -> Tensor:
    return query.new_empty(query.shape)
