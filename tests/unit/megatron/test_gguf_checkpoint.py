"""GGUF files as Hugging Face tensors: against the weights they were made from and against transformers' reader."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf.quants import dequantize, quantize
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from grpo_mc.megatron.gguf_checkpoint import GgufCheckpoint, llama3_scaling, unpermute_rotary_rows
from grpo_mc.megatron.hf_checkpoint import open_checkpoint
from helpers.tiny_gguf import write_gguf
from helpers.tiny_models import build_tiny_model

FAMILIES = ("llama", "qwen2", "qwen3")


@pytest.mark.parametrize("family", FAMILIES)
def test_values_names_and_architecture_come_back(family: str, tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    source = open_checkpoint(tiny_model(family))
    checkpoint = GgufCheckpoint(write_gguf(source, tmp_path / "x.gguf"))
    # GGUF holds the epsilon in float32 and does not hold the spread of random weights.
    eps = float(np.float32(source.architecture.rms_norm_eps))
    assert checkpoint.architecture == replace(source.architecture, rms_norm_eps=eps, initializer_range=0.02)
    assert sorted(checkpoint.names()) == sorted(source.names())
    for name, tensor in checkpoint.tensors():
        assert tensor.dtype == torch.float32 and torch.equal(tensor, source.tensor(name)), name


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers_reading_of_the_same_quantised_file(
    family: str, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    # transformers does not read a Qwen3 file's head_dim and takes 128.
    source = tiny_model(family, **({"head_dim": 128} if family == "qwen3" else {}))
    write_gguf(open_checkpoint(source), tmp_path / "x.gguf", gguf.GGMLQuantizationType.Q4_1)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="x.gguf", dtype=torch.float32)
    ours = transformers.AutoModelForCausalLM.from_pretrained(
        open_checkpoint(tmp_path / "x.gguf", tmp_path / "cache").folder
    )
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        expected, got = theirs(tokens).logits, ours(tokens).logits
    assert torch.equal(got, expected)


def test_dequantised_values_are_the_gguf_packages_own(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    source = open_checkpoint(tiny_model("qwen2"))
    kind = gguf.GGMLQuantizationType.Q8_0
    checkpoint = GgufCheckpoint(write_gguf(source, tmp_path / "x.gguf", kind))
    name = "model.layers.0.mlp.up_proj.weight"
    expected = dequantize(quantize(source.tensor(name).numpy(), kind), kind)
    assert np.array_equal(checkpoint.tensor(name).numpy(), expected)


def test_rotary_rows_of_one_head_are_put_back() -> None:
    """A head of 6 rows: llama.cpp rotates its rows (0,1), (2,3), (4,5); Hugging Face (0,3), (1,4), (2,5)."""
    stored = torch.tensor([[0.0], [3.0], [1.0], [4.0], [2.0], [5.0]])
    assert unpermute_rotary_rows(stored, 1)[:, 0].tolist() == [0, 1, 2, 3, 4, 5]
    two = torch.cat([stored, stored + 10])
    assert unpermute_rotary_rows(two, 2)[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 10, 11, 12, 13, 14, 15]


def test_llama_3_rotary_factors_give_back_their_settings(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = transformers.LlamaConfig(
        rope_parameters={**scaling, "rope_theta": 500000.0}, head_dim=64, max_position_embeddings=131072
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 500000.0 ** (-torch.arange(0, 64, 2).float() / 64)
    factors = (plain / scaled).clamp(max=32.0)  # a file holds the factor itself, the quotient is it to rounding
    assert llama3_scaling(factors, 500000.0) == scaling
    assert llama3_scaling(torch.linspace(1.0, 8.0, 32), 500000.0) is None
    # and through a file
    rope = {"rope_theta": 500000.0, "rope_type": "default"}
    source = open_checkpoint(build_tiny_model(tmp_path / "model", "llama", head_dim=64, rope_parameters=rope))
    path = write_gguf(source, tmp_path / "x.gguf", extra={"rope_freqs.weight": factors.numpy()})
    checkpoint = GgufCheckpoint(path)
    assert checkpoint.architecture.rope_scaling == scaling
    assert "rope_freqs.weight" not in checkpoint.names()
    path = write_gguf(source, tmp_path / "y.gguf", extra={"rope_freqs.weight": np.full(32, 3.0, np.float32)})
    with pytest.raises(ValueError, match="rope_freqs.weight.*not Llama 3's"):
        GgufCheckpoint(path)


def test_other_families_and_experts_are_refused_by_name(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    source = open_checkpoint(tiny_model("llama"))
    with pytest.raises(ValueError, match="'gemma3'.*llama, qwen2, qwen3"):
        GgufCheckpoint(write_gguf(source, tmp_path / "x.gguf", architecture="gemma3"))
    with pytest.raises(ValueError, match="llama with experts"):
        GgufCheckpoint(write_gguf(source, tmp_path / "y.gguf", expert_count=8))


@pytest.mark.parametrize("keep", [0, 3, 50, 400, -100])
def test_truncated_file_is_one_clear_error(keep: int, tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    path = write_gguf(open_checkpoint(tiny_model("llama")), tmp_path / "x.gguf")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match="x.gguf is damaged or no GGUF file.*again"):
        GgufCheckpoint(path)


def test_missing_file_and_missing_tensor(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere.gguf is missing"):
        GgufCheckpoint(tmp_path / "nowhere.gguf")
    checkpoint = GgufCheckpoint(write_gguf(open_checkpoint(tiny_model("llama")), tmp_path / "x.gguf"))
    with pytest.raises(ValueError, match="no tensor 'lm_head.weight'"):
        checkpoint.tensor("lm_head.weight")
