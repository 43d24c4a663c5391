"""Names and layouts: Hugging Face tensors <-> parameters of Megatron-Core's GPTModel, with tensor-parallel slicing.

Everything here works on tensors and names; nothing here knows a model object, a rank's process groups or a file.
Layer and expert numbers of Hugging Face names are global; parameter names carry the GLOBAL layer number too (the
caller adds its pipeline stage's first layer), while `local_experts.{e}` is local and `expert_offset` is added.

    Megatron parameter (per tensor-parallel rank)   Hugging Face tensors
    embedding.word_embeddings.weight                model.embed_tokens.weight; rows padded with zeros, then split
    output_layer.weight                             lm_head.weight, or the embedding where the two are tied
    decoder.final_layernorm.weight                  model.norm.weight
    decoder.layers.{i}.
      input_layernorm.weight                        input_layernorm.weight
      self_attention.linear_qkv.{weight,bias}       {q,k,v}_proj: for each kv head its query heads, then k, then v,
                                                    [kv_heads, (queries_per_kv_head + 2) * head_dim, hidden]
      self_attention.linear_proj.weight             o_proj.weight, split by columns
      self_attention.{q,k}_layernorm.weight         {q,k}_norm.weight
      pre_mlp_layernorm.weight                      post_attention_layernorm.weight
      mlp.linear_fc1.weight                         [gate shard; up shard]: both halves are split, then stacked
      mlp.linear_fc2.weight                         down_proj.weight, split by columns
      mlp.router.weight                             block_sparse_moe.gate.weight
      mlp.experts.local_experts.{e}.linear_fc1/2    block_sparse_moe.experts.{e}.w1 (gate), w3 (up) / w2 (down)

No arithmetic is done on any value, so both directions are bit-exact.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from grpo_mc.megatron.hf_config import ModelArchitecture

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.linear_(fc[12])\.weight")


class TensorSource(Protocol):
    """Where Hugging Face tensors come from, e.g. a Checkpoint."""

    def tensor(self, name: str, rows: tuple[int, int] | None = None) -> Tensor:
        """Return the tensor, or rows [start, stop) of its first dimension."""
        ...


@dataclass(frozen=True)
class _Rule:
    """How one parameter is made: `rows` stacks the row shards of its sources, `columns` splits the one source's
    columns, `qkv` interleaves by kv head, `vocab` pads and splits rows, `whole` is the same on every rank."""

    kind: Literal["whole", "rows", "columns", "qkv", "vocab"]
    sources: tuple[str, ...]


def _rule(name: str, arch: ModelArchitecture, expert_offset: int) -> _Rule:
    if name == "embedding.word_embeddings.weight":
        return _Rule("vocab", ("model.embed_tokens.weight",))
    if name == "output_layer.weight":
        return _Rule("vocab", ("model.embed_tokens.weight" if arch.tie_word_embeddings else "lm_head.weight",))
    if name == "decoder.final_layernorm.weight":
        return _Rule("whole", ("model.norm.weight",))
    match = _LAYER.fullmatch(name)
    if match and int(match[1]) < arch.num_layers:
        rule = _layer_rule(f"model.layers.{int(match[1])}.", match[2], arch, expert_offset)
        if rule is not None:
            return rule
    raise ValueError(
        f"map weights: parameter '{name}' has no counterpart in a {arch.family} checkpoint of {arch.num_layers} "
        "layers; build the model from the checkpoint's own architecture"
    )


def _layer_rule(prefix: str, name: str, arch: ModelArchitecture, expert_offset: int) -> _Rule | None:
    """Return the rule of a layer's parameter, None where the architecture has no such parameter."""
    attention = prefix + "self_attn."
    rules = {
        "input_layernorm.weight": _Rule("whole", (prefix + "input_layernorm.weight",)),
        "pre_mlp_layernorm.weight": _Rule("whole", (prefix + "post_attention_layernorm.weight",)),
        "self_attention.linear_qkv.weight": _Rule("qkv", tuple(f"{attention}{x}_proj.weight" for x in "qkv")),
        "self_attention.linear_proj.weight": _Rule("columns", (attention + "o_proj.weight",)),
    }
    if arch.qkv_bias:
        rules["self_attention.linear_qkv.bias"] = _Rule("qkv", tuple(f"{attention}{x}_proj.bias" for x in "qkv"))
    if arch.qk_norm:
        for x in "qk":
            rules[f"self_attention.{x}_layernorm.weight"] = _Rule("whole", (f"{attention}{x}_norm.weight",))
    if arch.num_experts:
        moe = prefix + "block_sparse_moe."
        rules["mlp.router.weight"] = _Rule("whole", (moe + "gate.weight",))
        match = _EXPERT.fullmatch(name)
        if match and int(match[1]) + expert_offset < arch.num_experts:
            expert = f"{moe}experts.{int(match[1]) + expert_offset}."
            if match[2] == "fc1":
                return _Rule("rows", (expert + "w1.weight", expert + "w3.weight"))
            return _Rule("columns", (expert + "w2.weight",))
    else:
        mlp = prefix + "mlp."
        rules["mlp.linear_fc1.weight"] = _Rule("rows", (mlp + "gate_proj.weight", mlp + "up_proj.weight"))
        rules["mlp.linear_fc2.weight"] = _Rule("columns", (mlp + "down_proj.weight",))
    return rules.get(name)


def hf_tensor_shapes(arch: ModelArchitecture) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a checkpoint of this architecture, in the order of the layers.

    A tied `lm_head.weight` is not listed.
    """
    hidden, ffn = arch.hidden_size, arch.ffn_hidden_size
    queries, keys = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (arch.vocab_size, hidden)}
    for layer in range(arch.num_layers):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        for x, rows in (("q", queries), ("k", keys), ("v", keys)):
            shapes[f"{prefix}self_attn.{x}_proj.weight"] = (rows, hidden)
            if arch.qkv_bias:
                shapes[f"{prefix}self_attn.{x}_proj.bias"] = (rows,)
        if arch.qk_norm:
            shapes[prefix + "self_attn.q_norm.weight"] = (arch.head_dim,)
            shapes[prefix + "self_attn.k_norm.weight"] = (arch.head_dim,)
        shapes[prefix + "self_attn.o_proj.weight"] = (hidden, queries)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        if arch.num_experts:
            shapes[prefix + "block_sparse_moe.gate.weight"] = (arch.num_experts, hidden)
        for expert in range(arch.num_experts):
            for x, shape in (("w1", (ffn, hidden)), ("w3", (ffn, hidden)), ("w2", (hidden, ffn))):
                shapes[f"{prefix}block_sparse_moe.experts.{expert}.{x}.weight"] = shape
        if not arch.num_experts:
            for x, shape in (("gate", (ffn, hidden)), ("up", (ffn, hidden)), ("down", (hidden, ffn))):
                shapes[f"{prefix}mlp.{x}_proj.weight"] = shape
    shapes["model.norm.weight"] = (hidden,)
    if not arch.tie_word_embeddings:
        shapes["lm_head.weight"] = (arch.vocab_size, hidden)
    return shapes


def megatron_parameter(
    name: str,
    checkpoint: TensorSource,
    arch: ModelArchitecture,
    *,
    tp_rank: int = 0,
    tp_size: int = 1,
    expert_offset: int = 0,
    padded_vocab: int | None = None,
) -> Tensor:
    """Build one rank's shard of a Megatron parameter.

    Args:
        name: parameter name with the global layer number.
        checkpoint: source of the Hugging Face tensors.
        tp_rank, tp_size: position and size of the tensor-parallel group; for `local_experts` those of the expert
            tensor-parallel group.
        expert_offset: global number of this rank's `local_experts.0`.
        padded_vocab: rows of the embedding over all ranks, at least arch.vocab_size (default: exactly that). The
            rows past arch.vocab_size are zero.

    Returns:
        A contiguous tensor of its own, in the dtype of the checkpoint.

    Raises:
        ValueError: the architecture has no such parameter, or a size does not divide by tp_size.
    """
    rule = _rule(name, arch, expert_offset)
    shapes = [_source_shape(source, arch) for source in rule.sources]
    if rule.kind == "whole":
        return checkpoint.tensor(rule.sources[0])
    if rule.kind == "vocab":
        return _read_vocab_shard(rule.sources[0], checkpoint, arch, tp_rank, tp_size, padded_vocab)
    if rule.kind == "columns":
        start, stop = _span(shapes[0][1], tp_rank, tp_size, name)
        return checkpoint.tensor(rule.sources[0])[:, start:stop].clone(memory_format=torch.contiguous_format)
    if rule.kind == "qkv" and arch.num_kv_heads % tp_size:
        raise ValueError(
            f"map weights: {arch.num_kv_heads} key/value heads do not divide by tp={tp_size}; "
            "set parallel.tp to a divisor of them"
        )
    spans = [_span(shape[0], tp_rank, tp_size, name) for shape in shapes]
    parts = [checkpoint.tensor(source, rows=span) for source, span in zip(rule.sources, spans, strict=True)]
    return _interleave_qkv(parts, arch) if rule.kind == "qkv" else torch.cat(parts)


def _source_shape(source: str, arch: ModelArchitecture) -> tuple[int, ...]:
    """Shape of one Hugging Face tensor, without listing the whole model."""
    queries, keys = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    hidden, ffn = arch.hidden_size, arch.ffn_hidden_size
    part, leaf = source.rsplit(".", 2)[-2:]
    rows = {"q_proj": queries, "k_proj": keys, "v_proj": keys, "o_proj": hidden, "embed_tokens": arch.vocab_size}
    rows |= {"lm_head": arch.vocab_size, "gate_proj": ffn, "up_proj": ffn, "down_proj": hidden}
    rows |= {"w1": ffn, "w3": ffn, "w2": hidden, "gate": arch.num_experts}
    columns = {"o_proj": queries, "down_proj": ffn, "w2": ffn}
    if part in ("q_norm", "k_norm"):
        return (arch.head_dim,)
    if part not in rows:
        return (hidden,)
    return (rows[part],) if leaf == "bias" else (rows[part], columns.get(part, hidden))


def _span(size: int, tp_rank: int, tp_size: int, name: str) -> tuple[int, int]:
    if size % tp_size:
        raise ValueError(f"map weights: {name}: {size} does not divide by tp={tp_size}; set parallel.tp to a divisor")
    width = size // tp_size
    return tp_rank * width, (tp_rank + 1) * width


def _read_vocab_shard(
    source: str, checkpoint: TensorSource, arch: ModelArchitecture, tp_rank: int, tp_size: int, padded_vocab: int | None
) -> Tensor:
    padded = arch.vocab_size if padded_vocab is None else padded_vocab
    if padded < arch.vocab_size or padded % tp_size:
        raise ValueError(
            f"map weights: the padded vocabulary {padded} must be at least the model's {arch.vocab_size} and divide "
            f"by tp={tp_size}; choose another padding"
        )
    start, stop = _span(padded, tp_rank, tp_size, source)
    real = checkpoint.tensor(source, rows=(min(start, arch.vocab_size), min(stop, arch.vocab_size)))
    if len(real) == stop - start:
        return real
    return torch.cat([real, real.new_zeros(stop - start - len(real), arch.hidden_size)])


def _interleave_qkv(parts: list[Tensor], arch: ModelArchitecture) -> Tensor:
    """Whole kv heads of q, k, v, [heads * head_dim, ...] -> [kv_heads * (queries_per_kv_head + 2) * head_dim, ...]."""
    query, key, value = parts
    groups = key.shape[0] // arch.head_dim
    split = [part.reshape(groups, -1, *part.shape[1:]) for part in (query, key, value)]
    return torch.cat(split, dim=1).flatten(0, 1)


def hf_tensors(
    name: str, shards: list[Tensor], arch: ModelArchitecture, *, expert_offset: int = 0
) -> dict[str, Tensor]:
    """Join the tensor-parallel shards of one Megatron parameter and give back its Hugging Face tensors.

    Args:
        name: parameter name with the global layer number.
        shards: the parameter on every rank of its (expert) tensor-parallel group, in rank order. A parameter that is
            the same on all ranks may come as one shard; of several the first counts.
        expert_offset: global number of the `local_experts.0` of these shards.

    Returns:
        Hugging Face name -> tensor; may share memory with the shards. Empty for a tied `output_layer.weight`, whose
        value is the embedding's.

    Raises:
        ValueError: the architecture has no such parameter, or the shards do not add up to its shape.
    """
    rule = _rule(name, arch, expert_offset)
    if name == "output_layer.weight" and arch.tie_word_embeddings:
        return {}
    if rule.kind == "whole":
        tensors = [shards[0]]
    elif rule.kind == "vocab":
        tensors = [torch.cat(shards)[: arch.vocab_size] if len(shards) > 1 else shards[0][: arch.vocab_size]]
    elif rule.kind == "columns":
        tensors = [torch.cat(shards, dim=1) if len(shards) > 1 else shards[0]]
    elif rule.kind == "rows":
        halves = [shard.chunk(2) for shard in shards]
        tensors = [torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*halves, strict=True)]
    else:
        tensors = _split_qkv(shards, arch)
    result = dict(zip(rule.sources, tensors, strict=True))
    for source, tensor in result.items():
        if tuple(tensor.shape) != _source_shape(source, arch):
            raise ValueError(
                f"map weights: {len(shards)} shards of '{name}' make {list(tensor.shape)} for {source}, needed "
                f"{list(_source_shape(source, arch))}; pass every rank's shard once, in rank order"
            )
    return result


def _split_qkv(shards: list[Tensor], arch: ModelArchitecture) -> list[Tensor]:
    """Undo _interleave_qkv on the joined shards."""
    sizes = [arch.queries_per_kv_head * arch.head_dim, arch.head_dim, arch.head_dim]
    joined = torch.cat(shards) if len(shards) > 1 else shards[0]
    grouped = joined.reshape(-1, sum(sizes), *joined.shape[1:])
    return [part.flatten(0, 1) for part in grouped.split(sizes, dim=1)]
