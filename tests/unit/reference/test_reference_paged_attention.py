"""The plain paged_attention against torch's attention on gathered keys and values."""

from __future__ import annotations

import pytest
import torch

from grpo_mc.ops.reference import paged_attention


def test_rows_that_share_a_prompt_block_equal_attention_on_their_own_keys() -> None:
    generator = torch.Generator().manual_seed(0)
    cache_k, cache_v = (torch.randn(6, 4, 2, 8, generator=generator) for _ in range(2))
    query = torch.randn(3, 6, 8, generator=generator)
    tables = torch.tensor([[5, 1, 0], [5, 2, 3], [4, -1, -1]], dtype=torch.int32)
    lengths = torch.tensor([6, 12, 0], dtype=torch.int32)
    got = paged_attention(query, cache_k, cache_v, tables, lengths, scale=0.3)
    for row, length in ((0, 6), (1, 12)):
        blocks = tables[row, : -(-length // 4)].long()
        keys, values = (c[blocks].reshape(-1, 2, 8)[:length].repeat_interleave(3, dim=1) for c in (cache_k, cache_v))
        want = torch.nn.functional.scaled_dot_product_attention(
            query[row][:, None], keys.transpose(0, 1), values.transpose(0, 1), scale=0.3
        )
        torch.testing.assert_close(got[row], want[:, 0])
    assert got[2].abs().max() == 0


def test_length_beyond_the_table_is_refused() -> None:
    cache = torch.zeros(1, 4, 1, 2)
    with pytest.raises(ValueError, match="length 5"):
        paged_attention(
            torch.zeros(1, 1, 2), cache, cache, torch.zeros(1, 1, dtype=torch.int32), torch.tensor([5]), scale=1.0
        )


def test_heads_that_do_not_divide_are_refused() -> None:
    cache = torch.zeros(1, 4, 2, 2)
    with pytest.raises(ValueError, match="multiple of Hkv"):
        paged_attention(
            torch.zeros(1, 3, 2), cache, cache, torch.zeros(1, 1, dtype=torch.int32), torch.tensor([1]), scale=1.0
        )
