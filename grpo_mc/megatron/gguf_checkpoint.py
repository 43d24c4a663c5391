"""Reading GGUF files (llama.cpp's format) as Hugging Face tensors.

The `gguf` package parses the file and dequantises; here its metadata becomes a ModelArchitecture and its tensor names
become Hugging Face names. llama.cpp stores the query and key projections of family llama with the rows of each head
reordered, because its rotation pairs neighbouring rows (0, 1), (2, 3), ... where Hugging Face pairs row r with row
r + head_dim/2; the reordering is undone here. Qwen families are stored in Hugging Face's order.

Dequantised values are float32: a Q4_1 value is scale * code + minimum with float16 scale and minimum, which float32
holds to rounding and bfloat16 does not.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo_mc.megatron.hf_config import ModelArchitecture, architecture_from_dict

_FAMILIES = ("llama", "qwen2", "qwen3")
_TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<part>\w+)\.(?P<leaf>weight|bias)")


class GgufCheckpoint:
    """One GGUF file: `architecture`, and the tensors one after the other.

    The file is mapped while the object lives, so its pages count as resident memory; convert once and drop it.
    """

    def __init__(self, path: str | Path) -> None:
        """Open the file and read its metadata.

        Raises:
            ValueError: the file is missing, no GGUF, truncated, of another family, or uses settings not built here.
        """
        self.path = Path(path)
        self._reader = _open_reader(self.path)
        self._tensors = {hf_name(tensor.name): tensor for tensor in self._reader.tensors}
        factors = self._tensors.pop("rope_freqs.weight", None)
        self.architecture = self._read_architecture(None if factors is None else torch.tensor(factors.data))

    def names(self) -> list[str]:
        """Hugging Face names of the file's tensors."""
        return list(self._tensors)

    def tensor(self, name: str) -> Tensor:
        """Return one tensor, dequantised to float32, in Hugging Face's layout, in memory of its own.

        Raises:
            ValueError: the file has no such tensor, or the gguf package cannot dequantise its type.
        """
        from gguf.quants import dequantize

        if name not in self._tensors:
            raise ValueError(f"read GGUF: {self.path} has no tensor '{name}'; use a complete model file")
        stored = self._tensors[name]
        try:
            values = np.array(dequantize(stored.data, stored.tensor_type), dtype=np.float32)
        except NotImplementedError:
            raise ValueError(
                f"read GGUF: {self.path}: tensor '{stored.name}' is of type {stored.tensor_type.name}, which the gguf "
                "package cannot dequantise; use another quantisation of the model, e.g. Q8_0 or F16"
            ) from None
        tensor = torch.from_numpy(values)
        if self.architecture.family == "llama":
            if name.endswith("q_proj.weight"):
                tensor = unpermute_rotary_rows(tensor, self.architecture.num_heads)
            elif name.endswith("k_proj.weight"):
                tensor = unpermute_rotary_rows(tensor, self.architecture.num_kv_heads)
        return tensor

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) in the file's order; see tensor()."""
        for name in self._tensors:
            yield name, self.tensor(name)

    def _value(self, key: str) -> Any:
        """One metadata entry, None where the file has none."""
        field = self._reader.fields.get(key)
        return None if field is None else field.contents()

    def _read_architecture(self, rotary_factors: Tensor | None) -> ModelArchitecture:
        family = self._value("general.architecture")
        if family not in _FAMILIES or self._value(f"{family}.expert_count"):
            what = f"{family} with experts" if family in _FAMILIES else family
            raise ValueError(
                f"read GGUF: {self.path} holds a model of architecture '{what}', needed one of "
                f"{', '.join(_FAMILIES)} without experts; use the model's safetensors folder instead"
            )
        config = {key: value for key, value in self._config(family).items() if value is not None}
        if family == "qwen3" and {"hidden_size", "num_attention_heads"} <= config.keys():
            config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
        architecture = architecture_from_dict(config, source=f"metadata of {self.path}")
        rotated = self._value(f"{family}.rope.dimension_count")
        if rotated is not None and rotated != architecture.head_dim:
            raise ValueError(
                f"read GGUF: {self.path} rotates {rotated} of {architecture.head_dim} dimensions of a head; choose a "
                "model that rotates the whole head"
            )
        if rotary_factors is None:
            return architecture
        scaling = llama3_scaling(rotary_factors, architecture.rope_theta)
        if scaling is None or architecture.rope_scaling is not None:
            raise ValueError(
                f"read GGUF: {self.path} stores rotary factors (rope_freqs.weight) that are not Llama 3's; use the "
                "model's safetensors folder instead"
            )
        return replace(architecture, rope_scaling=scaling)

    def _config(self, family: str) -> dict[str, Any]:
        """The metadata under the keys of config.json; None where the file is silent."""
        heads = self._value(f"{family}.attention.head_count")
        scaling = self._value(f"{family}.rope.scaling.type")
        if "model.embed_tokens.weight" not in self._tensors:
            raise ValueError(f"read GGUF: {self.path} has no tensor 'token_embd.weight'; use a complete model file")
        ends = [self._value(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
        return {
            "model_type": family,
            "num_hidden_layers": self._value(f"{family}.block_count"),
            "hidden_size": self._value(f"{family}.embedding_length"),
            "intermediate_size": self._value(f"{family}.feed_forward_length"),
            "num_attention_heads": heads,
            # llama.cpp leaves the key out where every query head has its own key/value head.
            "num_key_value_heads": self._value(f"{family}.attention.head_count_kv") or heads,
            "head_dim": self._value(f"{family}.attention.key_length"),
            "vocab_size": int(self._tensors["model.embed_tokens.weight"].shape[1]),
            "max_position_embeddings": self._value(f"{family}.context_length"),
            "rms_norm_eps": self._value(f"{family}.attention.layer_norm_rms_epsilon"),
            "rope_theta": self._value(f"{family}.rope.freq_base"),
            "rope_scaling": None
            if scaling in (None, "none")
            else {"rope_type": scaling, "factor": self._value(f"{family}.rope.scaling.factor")},
            "tie_word_embeddings": "lm_head.weight" not in self._tensors,
            "eos_token_id": [end for end in ends if end is not None],
            "bos_token_id": self._value("tokenizer.ggml.bos_token_id"),
            "pad_token_id": self._value("tokenizer.ggml.padding_token_id"),
        }


def _open_reader(path: Path) -> Any:
    from gguf import GGUFReader

    if not path.is_file():
        raise ValueError(f"read GGUF: {path} is missing; check model.path")
    try:
        return GGUFReader(path)
    # The reader checks nothing itself: a truncated file shows as a failed reshape, index or decoding.
    except (ValueError, IndexError, KeyError, UnicodeDecodeError, OSError) as error:
        raise ValueError(
            f"read GGUF: {path} is damaged or no GGUF file ({error}); download or copy the file again"
        ) from error


def hf_name(name: str) -> str:
    """Translate a GGUF tensor name, e.g. blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight.

    Names of parts that are not built are returned as they are.
    """
    match = _NAME.fullmatch(name)
    if match:
        names = _TOP_NAMES if match["layer"] is None else _LAYER_NAMES
        prefix = "" if match["layer"] is None else f"model.layers.{match['layer']}."
        if match["part"] in names:
            return f"{prefix}{names[match['part']]}.{match['leaf']}"
    return name


def unpermute_rotary_rows(weight: Tensor, num_heads: int) -> Tensor:
    """Put the rows of a query or key projection from llama.cpp's order back into Hugging Face's.

    In llama.cpp's order rows 2r and 2r + 1 of a head rotate together; in Hugging Face's, rows r and r + head_dim/2.

    Args:
        weight: [num_heads * head_dim, hidden].
        num_heads: heads in `weight` (key/value heads for a key projection).
    """
    half = weight.shape[0] // num_heads // 2
    return weight.reshape(num_heads, half, 2, -1).transpose(1, 2).reshape(weight.shape)


def llama3_scaling(factors: Tensor, rope_theta: float) -> dict[str, Any] | None:
    """Recover the settings behind llama.cpp's `rope_freqs.weight`, which holds only their result.

    Llama 3.1 and later divide a frequency by `factor` where its wavelength passes 8192 tokens, leave it where the
    wavelength is below 8192/4, and blend in between; only `factor` differs between the models.

    Args:
        factors: what each frequency is divided by, float32 [head_dim / 2].
        rope_theta: base of the frequencies.

    Returns:
        ModelArchitecture.rope_scaling, or None when these settings do not give the factors.
    """
    low, high, context = 1.0, 4.0, 8192
    factor = float(factors.max())
    half = factors.numel()
    turns = context / (2 * math.pi) * rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)  # [head_dim/2]
    blend = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    expected = 1.0 / ((1.0 - blend) / factor + blend)
    if not torch.allclose(factors.double(), expected, rtol=1e-4):
        return None
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": context,
    }
