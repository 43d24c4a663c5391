"""Attention of one new query per row over that row's keys and values, which lie in fixed-size blocks of a cache.

Row b has lengths[b] cached positions; position i is slot i % block of cache block block_tables[b, i // block]. Several
rows may name the same block (the prompt shared by a group). Query head h reads key/value head h // (Hq / Hkv).
"""

from __future__ import annotations

import torch
from torch import Tensor


def paged_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, block_tables: Tensor, lengths: Tensor, *, scale: float
) -> Tensor:
    """softmax(scale * q k) v for each row; decoding only, no gradient.

    Args:
        query: [B, Hq, D] float.
        key_cache: [N, block, Hkv, D].
        value_cache: [N, block, Hkv, D].
        block_tables: [B, M] int32, cache block of each stretch of `block` positions; entries past
            ceil(length / block) are never read.
        lengths: [B] int32, cached positions of each row, the new token's own included; 0 gives a zero output.
        scale: factor on the scores, usually 1 / sqrt(D).

    Returns:
        [B, Hq, D], dtype of query; computed in float32 (float64 for float64 input).

    Raises:
        ValueError: shapes that do not fit, or a length beyond M * block.
    """
    num_rows, num_heads, head_dim = query.shape
    block, num_kv_heads = key_cache.shape[1], key_cache.shape[2]
    if key_cache.shape != value_cache.shape or key_cache.shape[3] != head_dim or num_heads % num_kv_heads:
        raise ValueError(
            f"paged_attention: query is {list(query.shape)}, key_cache {list(key_cache.shape)}, value_cache "
            f"{list(value_cache.shape)}; need [B, Hq, D] and twice [N, block, Hkv, D] with Hq a multiple of Hkv"
        )
    if block_tables.shape[0] != num_rows or lengths.shape != (num_rows,):
        raise ValueError(
            f"paged_attention: block_tables are {list(block_tables.shape)} and lengths {list(lengths.shape)} "
            f"for {num_rows} rows; need [{num_rows}, M] and [{num_rows}]"
        )
    if num_rows and int(lengths.max()) > block_tables.shape[1] * block:
        raise ValueError(
            f"paged_attention: a row has length {int(lengths.max())} but block_tables hold "
            f"{block_tables.shape[1]} blocks of {block}; widen block_tables"
        )
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    output = torch.zeros_like(query)
    for row in range(num_rows):
        length = int(lengths[row])
        if length == 0:
            continue
        blocks = block_tables[row, : -(-length // block)].long()
        keys = key_cache[blocks].flatten(0, 1)[:length].to(dtype)  # [length, Hkv, D]
        values = value_cache[blocks].flatten(0, 1)[:length].to(dtype)
        for head in range(num_heads):
            kv_head = head // (num_heads // num_kv_heads)
            scores = (keys[:, kv_head] @ query[row, head].to(dtype)) * scale  # [length]
            output[row, head] = (torch.softmax(scores, dim=0) @ values[:, kv_head]).to(query.dtype)
    return output
