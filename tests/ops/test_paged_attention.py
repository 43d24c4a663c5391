"""paged_attention: the reference over tricky shapes, independence of batch, layout and threads, bad tables."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_mc import ops
from grpo_mc.ops import reference
from helpers import cuda_emulator
from helpers.compare import assert_close


def make(lengths: list[int], heads: int, kv_heads: int, dim: int, block: int, dtype=torch.float32, seed: int = 0):
    """Query, caches with unused blocks full of NaN, tables with blocks in random order, lengths."""
    generator = torch.Generator().manual_seed(seed)
    widest = max([-(-n // block) for n in lengths], default=0)
    total = sum(-(-n // block) for n in lengths) + 3
    order = torch.randperm(total, generator=generator).int()
    tables = torch.full((len(lengths), widest + 1), -7, dtype=torch.int32)  # entries past the end are never read
    used = 0
    keys = torch.full((total, block, kv_heads, dim), float("nan"), dtype=dtype)
    values = keys.clone()
    for row, n in enumerate(lengths):
        for i in range(-(-n // block)):
            tables[row, i] = order[used]
            filled = min(block, n - i * block)
            for cache in (keys, values):
                cache[order[used], :filled] = torch.randn(filled, kv_heads, dim, generator=generator).to(dtype)
            used += 1
    query = torch.randn(len(lengths), heads, dim, generator=generator).to(dtype)
    return query, keys, values, tables, torch.tensor(lengths, dtype=torch.int32)


def wide(inputs):
    return [x.double() if x.is_floating_point() else x for x in inputs]


@pytest.mark.parametrize("heads, kv_heads, dim", [(9, 3, 64), (4, 4, 16), (8, 1, 128), (2, 2, 13), (14, 2, 64)])
@pytest.mark.parametrize("block", (1, 16, 20))
def test_matches_the_float64_reference(heads: int, kv_heads: int, dim: int, block: int) -> None:
    inputs = make([0, 1, 15, 16, 17, 127, 128, 129, 300], heads, kv_heads, dim, block)
    got = ops.paged_attention(*inputs, scale=dim**-0.5)
    assert_close(got, reference.paged_attention(*wide(inputs), scale=dim**-0.5), 1e-6, (heads, kv_heads, dim, block))
    assert float(got[0].abs().max()) == 0  # length 0


def test_two_keys_by_hand() -> None:
    """Scores 0 and ln 3 give weights 1/4 and 3/4."""
    query = torch.tensor([[[1.0]]])
    keys = torch.tensor([0.0, float(torch.tensor(3.0).log())]).reshape(1, 2, 1, 1)
    values = torch.tensor([4.0, 8.0]).reshape(1, 2, 1, 1)
    out = ops.paged_attention(query, keys, values, torch.tensor([[0]]).int(), torch.tensor([2]).int(), scale=1.0)
    assert float(out) == pytest.approx(7.0, abs=1e-6)


def test_bf16_caches() -> None:
    inputs = make([5, 40, 200], 6, 2, 64, 16, torch.bfloat16)
    got = ops.paged_attention(*inputs, scale=0.125)
    assert got.dtype == torch.bfloat16
    want = reference.paged_attention(*wide(inputs), scale=0.125)
    assert_close(got, want, 4e-3)
    assert_close(ops.paged_attention(inputs[0].float(), *inputs[1:], scale=0.125), want, 1e-6)


def test_large_scores_do_not_overflow() -> None:
    inputs = make([150, 300], 4, 2, 32, 16)
    inputs = (inputs[0] * 1e3, *inputs[1:])
    got = ops.paged_attention(*inputs, scale=1.0)
    assert_close(got, reference.paged_attention(*wide(inputs), scale=1.0), 1e-4)


def test_rows_may_share_blocks_and_do_not_depend_on_the_batch() -> None:
    query, keys, values, tables, lengths = make([100, 100, 37], 9, 3, 64, 16)
    tables[1] = tables[0]  # a shared prompt
    whole = ops.paged_attention(query, keys, values, tables, lengths, scale=0.125)
    for row in range(3):
        alone = ops.paged_attention(
            query[row : row + 1], keys, values, tables[row : row + 1], lengths[row : row + 1], scale=0.125
        )
        assert torch.equal(whole[row : row + 1], alone)


def test_block_size_does_not_change_a_bit() -> None:
    """The same tokens laid out in blocks of 16 and of 5."""
    query, keys, values, tables, lengths = make([100], 4, 2, 32, 16)
    tokens = [cache[tables[0, :7].long()].flatten(0, 1)[:100] for cache in (keys, values)]
    other = [cache.reshape(20, 5, 2, 32) for cache in tokens]
    fine = ops.paged_attention(query, *other, torch.arange(20).int()[None], lengths, scale=0.2)
    assert torch.equal(fine, ops.paged_attention(query, keys, values, tables, lengths, scale=0.2))


def test_strided_caches() -> None:
    """One cache of a stacked [2, N, block, Hkv, D] or of a [layers, ...] buffer is a view with other strides."""
    query, keys, values, tables, lengths = make([33, 70], 4, 2, 16, 16)
    stacked = torch.stack([keys, values], dim=2)  # [N, block, 2, Hkv, D]
    got = ops.paged_attention(query, stacked[:, :, 0], stacked[:, :, 1], tables, lengths, scale=0.25)
    assert torch.equal(got, ops.paged_attention(query, keys, values, tables, lengths, scale=0.25))


def test_one_and_two_threads_agree_bit_for_bit() -> None:
    inputs = make([1, 500, 64, 77], 9, 3, 64, 16)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            results.append(ops.paged_attention(*inputs, scale=0.125))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*results)


def test_opcheck() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        query, keys, values, tables, lengths = make([3, 18], 4, 2, 8, 16, dtype)
        torch.library.opcheck(torch.ops.grpo_mc.paged_attention, (query, keys, values, tables, lengths, 0.3))


def test_empty_batch() -> None:
    query, keys, values, tables, lengths = make([4], 4, 2, 8, 16)
    out = ops.paged_attention(query[:0], keys, values, tables[:0], lengths[:0], scale=0.3)
    assert out.shape == (0, 4, 8)


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("lengths", torch.tensor([1, 1]), "lengths has dtype Long"),
        ("query", torch.zeros(2, 3, 8), "a multiple of Hkv"),
        ("query", torch.zeros(2, 4, 8).double(), "query has dtype Double"),
        ("value_cache", torch.zeros(4, 16, 2, 8).bfloat16(), "one dtype"),
        ("key_cache", torch.zeros(4, 16, 2, 4), "value_cache"),
    ],
)
def test_user_mistakes_are_value_errors(name: str, value: torch.Tensor, message: str) -> None:
    arguments = {
        "query": torch.zeros(2, 4, 8),
        "key_cache": torch.zeros(4, 16, 2, 8),
        "value_cache": torch.zeros(4, 16, 2, 8),
        "block_tables": torch.zeros(2, 2, dtype=torch.int32),
        "lengths": torch.tensor([20, 1], dtype=torch.int32),
        name: value,
    }
    with pytest.raises(ValueError, match=message):
        ops.paged_attention(**arguments, scale=1.0)


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("lengths", torch.tensor([33, 1]).int(), r"lengths\[0\] is 33; it must lie in \[0, 32\]"),
        ("lengths", torch.tensor([-1, 1]).int(), r"lengths\[0\] is -1"),
        ("block_tables", torch.tensor([[0, 9], [0, 0]]).int(), r"block_tables\[0, 1\] is 9; the cache has blocks 0"),
        ("block_tables", torch.tensor([[-1, 0], [0, 0]]).int(), r"block_tables\[0, 0\] is -1"),
    ],
)
def test_a_row_that_leaves_the_cache_is_an_error_or_on_a_gpu_nan(name: str, value: torch.Tensor, message: str) -> None:
    arguments = {
        "query": torch.ones(2, 4, 8),
        "key_cache": torch.ones(4, 16, 2, 8),
        "value_cache": torch.ones(4, 16, 2, 8),
        "block_tables": torch.zeros(2, 2, dtype=torch.int32),
        "lengths": torch.tensor([20, 1], dtype=torch.int32),
        name: value,
    }
    if not cuda_emulator.IS_USED:
        with pytest.raises(ValueError, match=message):
            ops.paged_attention(**arguments, scale=1.0)
        return
    out = ops.paged_attention(**arguments, scale=1.0)
    assert bool(out[0].isnan().all()) and torch.equal(out[1], torch.ones(4, 8))


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
def test_long_rows(dtype: torch.dtype, bound: float) -> None:
    """Several parts on a GPU, whose ends lie in and between blocks; eleven query heads to a key-value head."""
    inputs = make([511, 512, 513, 1025, 40], 22, 2, 24, 24, dtype)
    got = ops.paged_attention(*inputs, scale=0.2)
    assert_close(got, reference.paged_attention(*wide(inputs), scale=0.2), bound)


def test_any_address() -> None:
    """Caches whose rows begin in the middle of sixteen bytes give the same bits."""
    query, keys, values, tables, lengths = make([33, 600], 4, 2, 16, 16)
    want = ops.paged_attention(query, keys, values, tables, lengths, scale=0.25)
    shifted = [torch.cat([cache.new_zeros(1), cache.flatten()])[1:].view(cache.shape) for cache in (keys, values)]
    assert shifted[0].data_ptr() % 16 != 0
    assert torch.equal(ops.paged_attention(query, *shifted, tables, lengths, scale=0.25), want)


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 300), max_size=5),
    kv_heads=st.integers(1, 3),
    share=st.integers(1, 5),
    dim=st.integers(1, 70),
    block=st.integers(1, 40),
    scale=st.floats(0.01, 1.0),
    seed=st.integers(0, 1000),
)
def test_fuzz_against_the_reference(lengths, kv_heads, share, dim, block, scale, seed) -> None:
    inputs = make(lengths, kv_heads * share, kv_heads, dim, block, seed=seed)
    got = ops.paged_attention(*inputs, scale=scale)
    assert_close(got, reference.paged_attention(*wide(inputs), scale=scale), 2e-6)
