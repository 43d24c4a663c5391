"""Hugging Face tensors <-> Megatron parameters: hand-worked layouts, and bit-exact round trips of every family."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from grpo_mc.megatron.hf_checkpoint import open_checkpoint
from grpo_mc.megatron.hf_config import ModelArchitecture
from grpo_mc.megatron.hf_mapping import hf_tensor_shapes, hf_tensors, megatron_parameter

FAMILIES = ("llama", "qwen2", "qwen3", "mixtral")
QKV = "decoder.layers.0.self_attention.linear_qkv"


class Tensors(dict[str, Tensor]):
    """A TensorSource in memory."""

    def tensor(self, name: str, rows: tuple[int, int] | None = None) -> Tensor:
        return self[name].clone() if rows is None else self[name][slice(*rows)].clone()


def small(**changes: object) -> ModelArchitecture:
    """Two query heads per key/value head, head_dim 2, hidden size 1: small enough to write down."""
    fields: dict[str, object] = dict(
        family="llama", num_layers=1, hidden_size=1, ffn_hidden_size=4, num_heads=4, num_kv_heads=2, head_dim=2,
        vocab_size=5, rope_theta=1e4, rms_norm_eps=1e-6, tie_word_embeddings=False, max_positions=8,
    )  # fmt: skip
    return ModelArchitecture(**(fields | changes))  # type: ignore[arg-type]


def column(*values: float) -> Tensor:
    return torch.tensor(values)[:, None]


def parameter_names(arch: ModelArchitecture, num_experts: int | None = None) -> Iterator[str]:
    """Names of GPTModel's parameters under our layer spec, with `num_experts` local experts."""
    yield "embedding.word_embeddings.weight"
    for layer in range(arch.num_layers):
        prefix = f"decoder.layers.{layer}."
        yield prefix + "input_layernorm.weight"
        yield prefix + "self_attention.linear_qkv.weight"
        if arch.qkv_bias:
            yield prefix + "self_attention.linear_qkv.bias"
        if arch.qk_norm:
            yield prefix + "self_attention.q_layernorm.weight"
            yield prefix + "self_attention.k_layernorm.weight"
        yield prefix + "self_attention.linear_proj.weight"
        yield prefix + "pre_mlp_layernorm.weight"
        if arch.num_experts:
            yield prefix + "mlp.router.weight"
            for expert in range(arch.num_experts if num_experts is None else num_experts):
                yield f"{prefix}mlp.experts.local_experts.{expert}.linear_fc1.weight"
                yield f"{prefix}mlp.experts.local_experts.{expert}.linear_fc2.weight"
        else:
            yield prefix + "mlp.linear_fc1.weight"
            yield prefix + "mlp.linear_fc2.weight"
    yield "decoder.final_layernorm.weight"
    yield "output_layer.weight"


def test_qkv_is_interleaved_by_key_value_head() -> None:
    source = Tensors(
        {
            "model.layers.0.self_attn.q_proj.weight": column(0, 1, 2, 3, 4, 5, 6, 7),
            "model.layers.0.self_attn.k_proj.weight": column(10, 11, 12, 13),
            "model.layers.0.self_attn.v_proj.weight": column(20, 21, 22, 23),
        }
    )
    first, second = [0, 1, 2, 3, 10, 11, 20, 21], [4, 5, 6, 7, 12, 13, 22, 23]
    whole = megatron_parameter(QKV + ".weight", source, small())
    assert whole[:, 0].tolist() == first + second
    for rank, expected in enumerate((first, second)):
        shard = megatron_parameter(QKV + ".weight", source, small(), tp_rank=rank, tp_size=2)
        assert shard[:, 0].tolist() == expected


def test_qkv_bias_follows_the_weight() -> None:
    arch = small(family="qwen2", qkv_bias=True)
    source = Tensors(
        {
            "model.layers.0.self_attn.q_proj.bias": torch.arange(8.0),
            "model.layers.0.self_attn.k_proj.bias": torch.arange(10.0, 14.0),
            "model.layers.0.self_attn.v_proj.bias": torch.arange(20.0, 24.0),
        }
    )
    shard = megatron_parameter(QKV + ".bias", source, arch, tp_rank=1, tp_size=2)
    assert shard.tolist() == [4, 5, 6, 7, 12, 13, 22, 23]


def test_gate_and_up_are_each_split_then_stacked() -> None:
    source = Tensors(
        {
            "model.layers.0.mlp.gate_proj.weight": column(0, 1, 2, 3),
            "model.layers.0.mlp.up_proj.weight": column(10, 11, 12, 13),
            "model.layers.0.mlp.down_proj.weight": torch.tensor([[30.0, 31, 32, 33]]),
        }
    )
    fc1 = [
        megatron_parameter("decoder.layers.0.mlp.linear_fc1.weight", source, small(), tp_rank=rank, tp_size=2)
        for rank in range(2)
    ]
    assert [shard[:, 0].tolist() for shard in fc1] == [[0, 1, 10, 11], [2, 3, 12, 13]]
    fc2 = megatron_parameter("decoder.layers.0.mlp.linear_fc2.weight", source, small(), tp_rank=1, tp_size=2)
    assert fc2.tolist() == [[32, 33]] and fc2.is_contiguous()


def test_padded_vocabulary_is_zero_and_is_cut_off_again() -> None:
    """H19: V=5 padded to 8 over tp=2; the padding never comes back as a row of the checkpoint, whatever it holds."""
    arch = small()
    source = Tensors({"lm_head.weight": column(1, 2, 3, 4, 5)})
    shards = [
        megatron_parameter("output_layer.weight", source, arch, tp_rank=rank, tp_size=2, padded_vocab=8)
        for rank in range(2)
    ]
    assert [shard[:, 0].tolist() for shard in shards] == [[1, 2, 3, 4], [5, 0, 0, 0]]
    shards[1][1:] = 50.0
    assert hf_tensors("output_layer.weight", shards, arch)["lm_head.weight"][:, 0].tolist() == [1, 2, 3, 4, 5]


def test_a_rank_with_padding_only_gets_zeros() -> None:
    source = Tensors({"lm_head.weight": column(1, 2, 3, 4, 5)})
    shard = megatron_parameter("output_layer.weight", source, small(), tp_rank=3, tp_size=4, padded_vocab=8)
    assert shard.tolist() == [[0.0], [0.0]]


def test_tied_output_layer_is_the_embedding_and_is_not_exported() -> None:
    arch = small(tie_word_embeddings=True)
    source = Tensors({"model.embed_tokens.weight": column(1, 2, 3, 4, 5)})
    copy = megatron_parameter("output_layer.weight", source, arch)
    assert torch.equal(copy, source["model.embed_tokens.weight"])
    assert hf_tensors("output_layer.weight", [copy], arch) == {}
    assert "lm_head.weight" not in hf_tensor_shapes(arch)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip_is_bit_exact(family: str, tp: int, tiny_model: Callable[..., Path]) -> None:
    checkpoint = open_checkpoint(tiny_model(family, num_attention_heads=8, num_key_value_heads=4))
    arch = checkpoint.architecture
    out: dict[str, Tensor] = {}
    for name in parameter_names(arch):
        shards = [
            megatron_parameter(name, checkpoint, arch, tp_rank=rank, tp_size=tp, padded_vocab=384) for rank in range(tp)
        ]
        assert all(shard.is_contiguous() for shard in shards)
        out |= hf_tensors(name, shards, arch)
    assert sorted(out) == sorted(checkpoint.names())
    for name, tensor in out.items():
        assert torch.equal(tensor, checkpoint.tensor(name)), name


def test_experts_are_numbered_from_the_expert_offset(tiny_model: Callable[..., Path]) -> None:
    """ep=2: rank 1 holds experts 2 and 3 as local experts 0 and 1; their tp may differ from the attention's."""
    checkpoint = open_checkpoint(tiny_model("mixtral"))
    arch = checkpoint.architecture
    name = "decoder.layers.3.mlp.experts.local_experts.1.linear_fc1.weight"
    shards = [megatron_parameter(name, checkpoint, arch, tp_rank=rank, tp_size=2, expert_offset=2) for rank in range(2)]
    prefix = "model.layers.3.block_sparse_moe.experts.3."
    back = hf_tensors(name, shards, arch, expert_offset=2)
    assert sorted(back) == [prefix + "w1.weight", prefix + "w3.weight"]
    assert all(torch.equal(tensor, checkpoint.tensor(key)) for key, tensor in back.items())
    gate_rows = arch.ffn_hidden_size // 2
    assert torch.equal(shards[0][:gate_rows], checkpoint.tensor(prefix + "w1.weight")[:gate_rows])


@pytest.mark.parametrize("family", FAMILIES)
def test_listed_shapes_are_those_transformers_writes(family: str, tiny_model: Callable[..., Path]) -> None:
    from safetensors import safe_open

    folder = tiny_model(family)
    with safe_open(folder / "model.safetensors", "pt") as file:
        written = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert hf_tensor_shapes(open_checkpoint(folder).architecture) == written


@pytest.mark.parametrize(
    "name",
    [
        "decoder.layers.1.input_layernorm.weight",
        "decoder.layers.0.self_attention.linear_qkv.bias",
        "decoder.layers.0.self_attention.q_layernorm.weight",
        "decoder.layers.0.mlp.router.weight",
        "decoder.layers.0.mlp.linear_fc1.bias",
        "position_embeddings.weight",
    ],
)
def test_parameter_the_family_does_not_have_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        megatron_parameter(name, Tensors(), small())
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        hf_tensors(name, [torch.zeros(1)], small())


def test_more_tensor_parallel_ranks_than_key_value_heads_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match="2 key/value heads.*tp=4.*parallel.tp"):
        megatron_parameter(QKV + ".weight", Tensors(), small(), tp_size=4)
    with pytest.raises(ValueError, match="padded vocabulary 6.*tp=4"):
        megatron_parameter("output_layer.weight", Tensors(), small(), tp_size=4, padded_vocab=6)
    with pytest.raises(ValueError, match="4 does not divide by tp=3"):
        megatron_parameter("decoder.layers.0.mlp.linear_fc1.weight", Tensors(), small(), tp_size=3)


def test_a_shard_left_out_is_noticed() -> None:
    with pytest.raises(ValueError, match="1 shards of 'decoder.layers.0.mlp.linear_fc1.weight'.*every rank's shard"):
        hf_tensors("decoder.layers.0.mlp.linear_fc1.weight", [torch.zeros(4, 1)], small())
