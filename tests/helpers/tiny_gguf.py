"""GGUF files of tiny models, written as llama.cpp's converter writes them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np

_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(
    source: Any,
    path: Path,
    quantization: gguf.GGMLQuantizationType | None = None,
    *,
    architecture: str | None = None,
    expert_count: int = 0,
    extra: dict[str, np.ndarray] | None = None,
) -> Path:
    """Writes the weights of a checkpoint as GGUF.

    Args:
        source: an open Checkpoint.
        path: the file to write.
        quantization: of the matrices; None = float32.
        architecture: written instead of the checkpoint's family.
        expert_count: written into the metadata if not 0.
        extra: further tensors by GGUF name.

    Returns: `path`.
    """
    arch = source.architecture
    writer = gguf.GGUFWriter(path, architecture or arch.family)
    writer.add_block_count(arch.num_layers)
    writer.add_context_length(arch.max_positions)
    writer.add_embedding_length(arch.hidden_size)
    writer.add_feed_forward_length(arch.ffn_hidden_size)
    writer.add_head_count(arch.num_heads)
    writer.add_head_count_kv(arch.num_kv_heads)
    writer.add_key_length(arch.head_dim)
    writer.add_layer_norm_rms_eps(arch.rms_norm_eps)
    writer.add_rope_freq_base(arch.rope_theta)
    if arch.family == "llama":
        writer.add_rope_dimension_count(arch.head_dim)
    writer.add_vocab_size(arch.vocab_size)
    if expert_count:
        writer.add_expert_count(expert_count)
    for token in arch.eos_token_ids:
        writer.add_eos_token_id(token)
    if arch.pad_token_id is not None:
        writer.add_pad_token_id(arch.pad_token_id)
    for name in source.names():
        values = source.tensor(name).numpy()
        if arch.family == "llama" and re.search(r"[qk]_proj\.weight", name):
            values = _permute(values, arch.num_heads if "q_proj" in name else arch.num_kv_heads)
        if quantization is not None and values.ndim == 2:
            writer.add_tensor(_gguf_name(name), gguf.quants.quantize(values, quantization), raw_dtype=quantization)
        else:
            writer.add_tensor(_gguf_name(name), np.ascontiguousarray(values))
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_name(name: str) -> str:
    stem, leaf = name.rsplit(".", 1)
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem)
    return f"blk.{match[1]}.{_LAYER[match[2]]}.{leaf}" if match else f"{_TOP[stem]}.{leaf}"


def _permute(values: np.ndarray, num_heads: int) -> np.ndarray:
    """The reordering of llama.cpp's convert_hf_to_gguf.py (LlamaModel.permute)."""
    return (
        values.reshape(num_heads, 2, values.shape[0] // num_heads // 2, *values.shape[1:])
        .swapaxes(1, 2)
        .reshape(values.shape)
    )
