"""Attention of packed groups: every response sees the prompt and itself, at its own positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grpo_mc.data.micro_batches import measure, plan_micro_batches
from grpo_mc.data.packing import pack
from grpo_mc.megatron import cpu_runtime
from helpers.compare import assert_close, relative_error
from helpers.training import make_groups

cpu_runtime.install()
from grpo_mc.megatron.layout import SharedPrefixLayout, make_block, rope_inverse_frequencies, rotate  # noqa: E402
from grpo_mc.megatron.micro_batch import make_micro_batch  # noqa: E402

CPU = torch.device("cpu")
RAGGED: list[tuple[int, list[int]]] = [(3, [4, 1, 7, 2]), (1, [1, 1]), (5, []), (6, [0, 9, 0]), (2, [0]), (4, [12])]


def packed_layout(lengths: list[tuple[int, list[int]]], pad_multiple: int = 1, beginning: int = 0) -> Any:
    groups = make_groups(lengths, 100, beginning=beginning)
    plan = plan_micro_batches([measure(group) for group in groups], 10_000, 1)[0]
    return make_micro_batch(pack(groups, plan[0], pad_multiple=pad_multiple), CPU)


def visibility(batch: Any) -> Tensor:
    """[T, T] bool from the packed lengths, pair by pair: whether row i sees row j."""
    owner, beginning = [(-1, -1)] * len(batch.tokens), [0] * len(batch.tokens)
    for number, block in enumerate(batch.packed.blocks):
        for row in range(block.start, block.start + block.prompt_length + sum(block.response_lengths)):
            owner[row], beginning[row] = (number, -1), block.beginning_length
        for sample, (start, length) in enumerate(zip(block.response_starts, block.response_lengths, strict=True)):
            for row in range(start, start + length):
                owner[row] = (number, sample)
    rows = len(owner)
    return torch.tensor(
        [
            [
                j < beginning[i] or (j <= i and owner[i][0] == owner[j][0] and owner[j][1] in (-1, owner[i][1]))
                for j in range(rows)
            ]
            for i in range(rows)
        ]
    )


def dense_attention(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scale: float) -> Tensor:
    repeat = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    scores = torch.einsum("ihd,jhd->hij", query, key) * scale
    return torch.einsum("hij,jhd->ihd", scores.masked_fill(~visible, -torch.inf).softmax(-1), value)


def heads_of(rows: int, seed: int = 0) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, heads, 8, generator=draw, requires_grad=True) for heads in (4, 2, 2)]


@pytest.mark.parametrize("pad_multiple", [1, 16])
@pytest.mark.parametrize("beginning", [0, 20])
def test_attention_is_that_of_the_full_mask(pad_multiple: int, beginning: int) -> None:
    batch = packed_layout(RAGGED, pad_multiple, beginning)
    assert batch.packed.blocks[1].beginning_length == beginning
    tensors = heads_of(len(batch.tokens))
    out = batch.layout.attend(1, *tensors, 0.3)
    expected = dense_attention(*tensors, visibility(batch), 0.3)
    assert_close(out.detach(), expected.detach(), 1e-6, "attention")
    weight = torch.randn_like(out)
    ours = torch.autograd.grad((out * weight).sum(), tensors)
    theirs = torch.autograd.grad((expected * weight).sum(), tensors)
    for name, mine, other in zip("qkv", ours, theirs, strict=True):
        assert_close(mine, other, 2e-6, f"gradient of {name}")


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 6), st.lists(st.integers(0, 6), max_size=4)), min_size=1, max_size=4),
    st.integers(0, 9),
)
def test_any_lengths(lengths: list[tuple[int, list[int]]], beginning: int) -> None:
    batch = packed_layout(lengths, beginning=beginning)
    tensors = heads_of(len(batch.tokens))
    out = batch.layout.attend(1, *tensors, 1.0)
    expected = dense_attention(*tensors, visibility(batch), 1.0)
    assert relative_error(out.detach(), expected.detach()) < 2e-6


def test_siblings_and_padding_are_invisible() -> None:
    batch = packed_layout([(3, [4, 5])], pad_multiple=16)
    query, key, value = (x.detach() for x in heads_of(len(batch.tokens)))
    before = batch.layout.attend(1, query, key, value, 1.0)
    first, second = (range(s, s + n) for s, n in zip(
        batch.packed.blocks[0].response_starts, batch.packed.blocks[0].response_lengths, strict=True))  # fmt: skip
    padding = range(second[-1] + 1, len(batch.tokens))
    for row in (*second, *padding):
        key[row], value[row] = 50.0, 1e6
    after = batch.layout.attend(1, query, key, value, 1.0)
    assert torch.equal(before[:3], after[:3])
    assert torch.equal(before[list(first)], after[list(first)])


def test_an_empty_batch_has_no_rows() -> None:
    query, key, value = (x[:0] for x in heads_of(1))
    assert SharedPrefixLayout(positions=torch.zeros(0, dtype=torch.int64)).attend(1, query, key, value, 1.0).shape == (
        0,
        4,
        8,
    )


def test_block_rows_by_hand() -> None:
    block = make_block(2, 3, [5, 7, 7], [2, 0, 3], CPU)
    assert block.prompt == slice(2, 5)
    assert block.response_rows is not None and block.response_valid is not None
    assert block.response_rows.tolist() == [[5, 6, 6], [7, 8, 9]]  # the empty response is left out
    assert block.response_valid.tolist() == [0, 1, 3, 4, 5]
    assert make_block(0, 4, [4], [0], CPU).response_rows is None


def test_positions_continue_at_the_prompt() -> None:
    batch = packed_layout([(3, [3, 4])])
    assert batch.layout.positions.tolist() == [0, 1, 2, 3, 4, 3, 4, 5]  # the last token of a response is not fed


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}  # fmt: skip
SCALINGS = [None, {"rope_type": "default"}, {"rope_type": "linear", "factor": 4.0}, LLAMA3, LLAMA3 | {"factor": 32.0}]


@pytest.mark.parametrize("theta", [1e4, 5e5])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_frequencies_are_those_of_transformers(scaling: dict[str, Any] | None, theta: float) -> None:
    import transformers
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = {"rope_type": "default", **(scaling or {}), "rope_theta": theta}
    config = transformers.LlamaConfig(hidden_size=128, num_attention_heads=2, rope_parameters=parameters)
    rotary = LlamaRotaryEmbedding(config)
    assert rotary.attention_scaling == 1.0
    assert_close(rope_inverse_frequencies(64, theta, scaling), rotary.inv_freq, 1e-7, scaling)


def test_an_unknown_scaling_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="yarn"):
        rope_inverse_frequencies(64, 1e4, {"rope_type": "yarn", "factor": 2.0})


def test_rotation_is_that_of_transformers() -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    positions, frequencies = torch.tensor([0, 1, 7, 300]), rope_inverse_frequencies(8, 1e4, None)
    layout = SharedPrefixLayout(positions=positions)
    cos, sin = layout.cos_sin(frequencies, torch.float32)
    query, key, _ = (x.detach() for x in heads_of(4))
    angle = (positions[:, None] * frequencies).repeat(1, 2)[None]
    wanted = apply_rotary_pos_emb(query.transpose(0, 1)[None], key.transpose(0, 1)[None], angle.cos(), angle.sin())
    for mine, other in zip((rotate(query, cos, sin), rotate(key, cos, sin)), wanted, strict=True):
        assert_close(mine, other[0].transpose(0, 1), 1e-6, "rotation")
    assert torch.equal(rotate(query, cos, sin)[0], query[0])  # position 0 does not turn
