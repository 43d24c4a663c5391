"""ModelArchitecture: both spellings of config.json, and refusals that name file, key and value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from grpo_mc.megatron.hf_config import ModelArchitecture, architecture_from_dict, read_architecture

# Llama-3.2-1B's numbers in the spelling of its release (transformers 4).
LLAMA_3: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 16,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
}
QWEN2 = {
    "model_type": "qwen2",
    "num_hidden_layers": 24,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "max_window_layers": 21,
    "use_sliding_window": False,
    "tie_word_embeddings": True,
    "eos_token_id": 151645,
}
MIXTRAL = {
    "model_type": "mixtral",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": None,
    "eos_token_id": 2,
}


def test_llama_3_in_the_spelling_of_transformers_4() -> None:
    arch = architecture_from_dict(LLAMA_3)
    assert (arch.family, arch.num_layers, arch.head_dim, arch.queries_per_kv_head) == ("llama", 16, 64, 4)
    assert arch.rope_theta == 500000.0
    assert arch.rope_scaling == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert arch.tie_word_embeddings and not arch.qkv_bias and not arch.qk_norm and arch.num_experts == 0
    assert arch.eos_token_ids == (128001, 128008, 128009)
    hash(arch)  # frozen, so usable as a key


def test_rope_parameters_of_transformers_5_read_as_rope_theta_and_rope_scaling() -> None:
    new = {key: value for key, value in LLAMA_3.items() if key not in ("rope_theta", "rope_scaling")}
    new["rope_parameters"] = {**LLAMA_3["rope_scaling"], "rope_theta": 500000.0}
    assert architecture_from_dict(new) == architecture_from_dict(LLAMA_3)


def test_qwen2_has_biases_and_an_unused_sliding_window_is_no_matter() -> None:
    arch = architecture_from_dict(QWEN2)
    assert arch.qkv_bias and arch.head_dim == 64 and arch.rope_scaling is None and arch.rope_theta == 1e6


def test_mixtral_defaults_are_those_of_transformers() -> None:
    arch = architecture_from_dict(MIXTRAL)
    theirs = transformers.MixtralConfig(**MIXTRAL)
    assert (arch.num_experts, arch.experts_per_token) == (8, 2)
    assert arch.rms_norm_eps == theirs.rms_norm_eps == 1e-5
    assert arch.rope_theta == theirs.rope_parameters["rope_theta"] == 1e6


def test_old_llama_without_num_key_value_heads_has_one_per_query_head() -> None:
    config = {key: value for key, value in LLAMA_3.items() if key != "num_key_value_heads"}
    assert architecture_from_dict(config).num_kv_heads == 32


def test_old_type_key_of_linear_scaling() -> None:
    arch = architecture_from_dict(LLAMA_3 | {"rope_scaling": {"type": "linear", "factor": 4.0}})
    assert arch.rope_scaling == {"rope_type": "linear", "factor": 4.0}


def test_a_response_ends_at_every_id_of_either_file(tmp_path: Path) -> None:
    """Qwen2.5-Instruct names one id in config.json and another one more in generation_config.json."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN2))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [151645, 151643]}))
    assert read_architecture(tmp_path).eos_token_ids == (151645, 151643)


@pytest.mark.parametrize("base", [LLAMA_3, QWEN2, MIXTRAL], ids=["llama", "qwen2", "mixtral"])
def test_to_hf_config_dict_means_the_same_to_us_and_to_transformers(base: dict[str, Any], tmp_path: Path) -> None:
    arch = architecture_from_dict(base)
    written = arch.to_hf_config_dict("bfloat16")
    assert architecture_from_dict(written) == arch
    (tmp_path / "config.json").write_text(json.dumps(written))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    original = transformers.AutoConfig.for_model(**base)
    assert theirs.rope_parameters == original.rope_parameters
    for key in ("hidden_size", "num_key_value_heads", "rms_norm_eps", "tie_word_embeddings", "vocab_size"):
        assert getattr(theirs, key) == getattr(original, key)
    assert str(theirs.dtype) in ("torch.bfloat16", "bfloat16")


@pytest.mark.parametrize(
    ("base", "change", "words"),
    [
        (LLAMA_3, {"model_type": "gemma3"}, ["model_type", "gemma3", "llama, qwen2, qwen3, mixtral"]),
        (LLAMA_3, {"hidden_size": None}, ["hidden_size", "positive integer"]),
        (LLAMA_3, {"hidden_size": "2048"}, ["hidden_size", "'2048'", "positive integer"]),
        (LLAMA_3, {"num_key_value_heads": 5}, ["num_key_value_heads", "5", "num_attention_heads (32)"]),
        (LLAMA_3, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ["rope_scaling", "yarn", "llama3"]),
        (LLAMA_3, {"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, ["low_freq_factor"]),
        (LLAMA_3, {"attention_bias": True}, ["attention_bias", "True", "false"]),
        (LLAMA_3, {"mlp_bias": True}, ["mlp_bias"]),
        (LLAMA_3, {"hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
        (LLAMA_3, {"quantization_config": {"quant_method": "fp8"}}, ["quantization_config", "unquantised"]),
        (LLAMA_3, {"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
        (LLAMA_3, {"eos_token_id": "</s>"}, ["eos_token_id", "</s>"]),
        (LLAMA_3, {"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}}, ["auto_map"]),
        (MIXTRAL, {"sliding_window": 4096}, ["sliding_window", "4096", "max_position_embeddings (32768)"]),
        (QWEN2, {"use_sliding_window": True, "sliding_window": 4096}, ["sliding_window", "4096"]),
        (QWEN2, {"num_key_value_heads": None}, ["num_key_value_heads"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) and len(value) < 3 else "",
)
def test_unsupported_or_wrong_setting_is_refused_by_name(
    base: dict[str, Any], change: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ValueError) as caught:
        architecture_from_dict(base | change, source="models/x/config.json")
    for word in ["models/x/config.json", *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize("base", [LLAMA_3, QWEN2, MIXTRAL], ids=["llama", "qwen2", "mixtral"])
def test_no_key_of_a_wrong_type_is_more_than_one_clear_error(base: dict[str, Any]) -> None:
    """Every key that is read, with a value of every other type: accepted, or refused with file and key."""
    keys = {*base, "layer_types", "max_window_layers", "sliding_window", "use_sliding_window", "rope_parameters"}
    keys |= {"rope_scaling", "rope_theta", "hidden_act", "architectures", "auto_map", "pad_token_id", "head_dim"}
    nested = {"rope_type": ["x"], "rope_theta": "x", "factor": []}
    values = [5, -1, 0, 10**400, 1.5, float("inf"), float("nan"), "x", True, [], [1], ["x"], {}, {"a": 1}, nested]
    for key in sorted(keys):
        for value in values:
            config = base | {key: value}
            if base is QWEN2 and key in ("sliding_window", "max_window_layers", "layer_types"):
                config["use_sliding_window"] = True
            try:
                architecture_from_dict(config, source="x/config.json")
            except ValueError as error:
                assert "x/config.json" in str(error) and len(str(error)) < 500, (key, value)


@pytest.mark.parametrize(
    ("key", "value", "needed"),
    [
        ("layer_types", 5, "a list of strings"),
        ("layer_types", [["full_attention"]], "a list of strings"),
        ("max_window_layers", "a", "an integer"),
        ("sliding_window", "x", "an integer"),
        ("rope_scaling", {"rope_type": ["linear"]}, "rope_type of default, linear"),
        ("rope_theta", float("inf"), "a positive number"),
    ],
)
def test_a_key_of_a_wrong_type_is_refused_by_name(key: str, value: object, needed: str) -> None:
    with pytest.raises(ValueError, match=f"config.json: '{key}' is .*needed {needed}"):
        architecture_from_dict(QWEN2 | {"use_sliding_window": True, key: value})


def test_sliding_window_beyond_every_layer_or_the_context_is_not_in_force() -> None:
    window_from_layer_28 = {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 28}
    assert architecture_from_dict(QWEN2 | window_from_layer_28).num_layers == 24
    assert architecture_from_dict(MIXTRAL | {"sliding_window": 32768}).num_layers == 32


@pytest.mark.parametrize("content", [None, "{", "[1]", "[" * 100_000], ids=["missing", "cut", "list", "deep"])
def test_unreadable_config_json_is_one_clear_error(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match="config.json") as caught:
        read_architecture(tmp_path)
    assert "copy config.json of the model into the folder" in str(caught.value)


def test_fields_match_the_config_of_every_tiny_family(family_model: tuple[str, Path]) -> None:
    family, folder = family_model
    arch = read_architecture(folder)
    theirs = transformers.AutoConfig.from_pretrained(folder)
    assert isinstance(arch, ModelArchitecture) and arch.family == family
    assert arch.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    assert (arch.qkv_bias, arch.qk_norm, arch.num_experts > 0) == {
        "llama": (False, False, False),
        "qwen2": (True, False, False),
        "qwen3": (False, True, False),
        "mixtral": (False, False, True),
    }[family]
