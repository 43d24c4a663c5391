"""The shape of a model, read from the `config.json` of a Hugging Face folder.

Plain JSON is read here, never code from the folder. Four families are known by their `model_type`: llama, qwen2,
qwen3, mixtral. They share one decoder: RMSNorm before attention and MLP, rotary positions over the whole head
("rotate half" layout), grouped-query attention, a SiLU-gated MLP (per expert in mixtral). What differs is in the
fields of `ModelArchitecture`. A setting that this package cannot compute is refused by name instead of being
ignored, because an ignored setting gives a model that runs and is wrong.

Rotary settings have two spellings on disk, `rope_theta` + `rope_scaling` and, since transformers 5,
`rope_parameters`; both are read and both are written.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_mc.config.layout import ModelShape
from grpo_mc.data.strict_json import parse_json

FAMILIES = ("llama", "qwen2", "qwen3", "mixtral")

# What transformers assumes when config.json leaves the key out.
_DEFAULT_ROPE_THETA = {"llama": 1e4, "qwen2": 1e4, "qwen3": 1e4, "mixtral": 1e6}
_DEFAULT_RMS_NORM_EPS = {"llama": 1e-6, "qwen2": 1e-6, "qwen3": 1e-6, "mixtral": 1e-5}
_DEFAULT_MAX_POSITIONS = {"llama": 2048, "qwen2": 32768, "qwen3": 32768, "mixtral": 131072}
_ARCHITECTURE_CLASS = {family: f"{family.capitalize()}ForCausalLM" for family in FAMILIES}

_MAX_SIZE = 2**62 - 1  # of any size or count; torch counts in 64 bits

# The further keys of each supported kind of rotary scaling.
_ROPE_SCALING_KEYS: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


@dataclass(frozen=True)
class ModelArchitecture:
    """Everything about a model except its weights. Sizes are element counts of the whole, unsharded model."""

    family: str
    """One of FAMILIES; config.json's `model_type`."""
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    """Width of the gated MLP (of one expert in mixtral)."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    """Rows of the embedding in the checkpoint, without padding for tensor parallelism."""
    rope_theta: float
    rms_norm_eps: float
    tie_word_embeddings: bool
    max_positions: int
    rope_scaling: dict[str, Any] | None = field(default=None, hash=False)
    """None, {"rope_type": "linear", "factor"} or {"rope_type": "llama3", "factor", "low_freq_factor",
    "high_freq_factor", "original_max_position_embeddings"}."""
    qkv_bias: bool = False
    """Bias on the query, key and value projections only (qwen2)."""
    qk_norm: bool = False
    """RMSNorm over head_dim on queries and keys before the rotation (qwen3)."""
    num_experts: int = 0
    """0 = dense."""
    experts_per_token: int = 0
    eos_token_ids: tuple[int, ...] = ()
    """Every id that ends a response, generation_config.json's first; empty = the model names none."""
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    initializer_range: float = 0.02
    """Standard deviation of randomly initialised weights."""

    @property
    def queries_per_kv_head(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads

    def to_hf_config_dict(self, dtype: str = "float32") -> dict[str, Any]:
        """Return the content of a config.json that transformers 4 and 5 load as this model.

        Args:
            dtype: name of the stored weights' dtype, e.g. "float32" or "bfloat16".
        """
        eos: int | list[int] | None = list(self.eos_token_ids) or None
        if len(self.eos_token_ids) == 1:
            eos = self.eos_token_ids[0]
        scaling = dict(self.rope_scaling) if self.rope_scaling else None
        config: dict[str, Any] = {
            "architectures": [_ARCHITECTURE_CLASS[self.family]],
            "model_type": self.family,
            "num_hidden_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.ffn_hidden_size,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": self.rms_norm_eps,
            "tie_word_embeddings": self.tie_word_embeddings,
            "hidden_act": "silu",
            "initializer_range": self.initializer_range,
            "rope_theta": self.rope_theta,
            "rope_scaling": scaling,
            "rope_parameters": {**(scaling or {"rope_type": "default"}), "rope_theta": self.rope_theta},
            "bos_token_id": self.bos_token_id,
            "eos_token_id": eos,
            "pad_token_id": self.pad_token_id,
            "attention_dropout": 0.0,
            "torch_dtype": dtype,
            "use_cache": True,
        }
        if self.family in ("llama", "qwen3"):
            config["attention_bias"] = False
        if self.family == "llama":
            config["mlp_bias"] = False
        if self.family in ("qwen2", "qwen3"):
            config["use_sliding_window"] = False
        if self.family == "mixtral":
            config["sliding_window"] = None
            config["num_local_experts"] = self.num_experts
            config["num_experts_per_tok"] = self.experts_per_token
        return config


def model_shape(architecture: ModelArchitecture) -> ModelShape:
    """What of an architecture decides which layouts are possible."""
    dense = architecture.num_experts == 0
    return ModelShape(
        num_layers=architecture.num_layers, num_heads=architecture.num_heads, num_kv_heads=architecture.num_kv_heads,
        vocab_size=architecture.vocab_size, num_experts=architecture.num_experts, hidden_size=architecture.hidden_size,
        ffn_hidden_size=architecture.ffn_hidden_size if dense else 0,
        moe_ffn_hidden_size=0 if dense else architecture.ffn_hidden_size,
    )  # fmt: skip


def read_architecture(folder: str | Path) -> ModelArchitecture:
    """Read `folder`/config.json, and the end-of-text ids of `folder`/generation_config.json when it is there.

    Raises:
        ValueError: a file is missing or no JSON object, a key is missing or of the wrong type, or the model uses
            something this package does not compute (the message names file, key and value).
    """
    path = Path(folder) / "config.json"
    config = read_json_object(path, "copy config.json of the model into the folder")
    generation_path = path.with_name("generation_config.json")
    generation = {}
    if generation_path.exists():
        generation = read_json_object(generation_path, "repair or delete the file")
    return architecture_from_dict(config, generation, source=str(path))


def architecture_from_dict(
    config: Mapping[str, Any], generation: Mapping[str, Any] | None = None, *, source: str = "config.json"
) -> ModelArchitecture:
    """Build a ModelArchitecture from the content of config.json.

    Args:
        config: config.json's object.
        generation: generation_config.json's object; its `eos_token_id` come before those of `config`.
        source: file name for error messages.

    Raises:
        ValueError: as read_architecture.
    """
    keys = _Keys(config, source)
    family = keys.string("model_type")
    if family not in FAMILIES:
        raise keys.error("model_type", f"one of {', '.join(FAMILIES)}", "choose a model of these families")
    _refuse_unsupported(keys, family)
    num_heads = keys.positive_int("num_attention_heads")
    hidden_size = keys.positive_int("hidden_size")
    # Only Llama's first releases left the key out, meaning one key/value head per query head.
    num_kv_heads = keys.positive_int("num_key_value_heads", num_heads if family == "llama" else None)
    if num_heads % num_kv_heads:
        raise keys.error("num_key_value_heads", f"a divisor of num_attention_heads ({num_heads})")
    theta, scaling = _read_rope(keys, family)
    is_moe = family == "mixtral"
    return ModelArchitecture(
        family=family,
        num_layers=keys.positive_int("num_hidden_layers"),
        hidden_size=hidden_size,
        ffn_hidden_size=keys.positive_int("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_read_head_dim(keys, family, hidden_size, num_heads),
        vocab_size=keys.positive_int("vocab_size"),
        rope_theta=theta,
        rope_scaling=scaling,
        rms_norm_eps=keys.positive_float("rms_norm_eps", _DEFAULT_RMS_NORM_EPS[family]),
        tie_word_embeddings=keys.boolean("tie_word_embeddings", False),
        max_positions=keys.positive_int("max_position_embeddings", _DEFAULT_MAX_POSITIONS[family]),
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        num_experts=keys.positive_int("num_local_experts") if is_moe else 0,
        experts_per_token=keys.positive_int("num_experts_per_tok") if is_moe else 0,
        eos_token_ids=_read_eos(keys, generation or {}),
        bos_token_id=keys.optional_id("bos_token_id"),
        pad_token_id=keys.optional_id("pad_token_id"),
        initializer_range=keys.positive_float("initializer_range", 0.02),
    )


def read_json_object(path: Path, remedy: str) -> dict[str, Any]:
    """Read a JSON file whose top level is an object.

    Raises:
        ValueError: the file is missing, unreadable or something else; the message names it and ends with `remedy`.
    """
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"read model: {path} is missing; {remedy}") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"read model: {path} cannot be read as JSON ({error}); {remedy}") from error
    if not isinstance(content, dict):
        raise ValueError(f"read model: {path} holds a JSON {type(content).__name__}, not an object; {remedy}")
    return content


def _is_positive(value: Any) -> bool:
    """Whether a value is a number above 0 that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 < value <= sys.float_info.max


class _Keys:
    """Typed access to the keys of one config.json; errors name the file, the key and the value."""

    def __init__(self, config: Mapping[str, Any], source: str) -> None:
        self.config = config
        self.source = source

    def error(self, key: str, needed: str, remedy: str = "correct the file") -> ValueError:
        if key not in self.config:
            return ValueError(f"read model: {self.source} has no key '{key}' ({needed} is needed); {remedy}")
        value = repr(self.config[key])
        value = value if len(value) <= 200 else value[:197] + "..."
        return ValueError(f"read model: {self.source}: '{key}' is {value}, needed {needed}; {remedy}")

    def get(self, key: str, default: Any = None) -> Any:
        value = self.config.get(key)
        return default if value is None else value

    def string(self, key: str) -> str:
        value = self.get(key)
        if not isinstance(value, str):
            raise self.error(key, "a string")
        return value

    def positive_int(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= _MAX_SIZE:
            raise self.error(key, "a positive integer (below 2 ** 62)")
        return value

    def optional_int(self, key: str, default: int | None = None) -> int | None:
        value = self.get(key, default)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise self.error(key, "an integer or null")
        return value

    def positive_float(self, key: str, default: float) -> float:
        value = self.get(key, default)
        if not _is_positive(value):
            raise self.error(key, "a positive number")
        return float(value)

    def strings(self, key: str) -> list[str] | None:
        value = self.get(key)
        if value is not None and not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
            raise self.error(key, "a list of strings or null")
        return value

    def mapping(self, key: str) -> Mapping[str, Any]:
        """The object under the key; {} where it is left out or null."""
        value = self.get(key, {})
        if not isinstance(value, Mapping):
            raise self.error(key, "an object or null")
        return value

    def boolean(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def optional_id(self, key: str) -> int | None:
        value = self.get(key)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise self.error(key, "a token id or null")
        # Some files write -1 for "none".
        return value if value is not None and value >= 0 else None


def _refuse_unsupported(keys: _Keys, family: str) -> None:
    """Raise for the settings of these families that change the function the model computes and are not built."""
    if keys.get("hidden_act", "silu") not in ("silu", "swish"):
        raise keys.error("hidden_act", "'silu'", "choose a model with SiLU-gated MLPs")
    if keys.get("partial_rotary_factor", 1.0) != 1.0:
        raise keys.error("partial_rotary_factor", "1.0", "choose a model that rotates the whole head")
    for key in ("attention_bias", "mlp_bias"):
        # attention_bias also puts a bias on o_proj, which the layer spec does not have.
        if family != "qwen2" and keys.boolean(key, False):
            raise keys.error(key, "false", "choose a model without these biases")
    if "quantization_config" in keys.config and keys.config["quantization_config"] is not None:
        raise keys.error("quantization_config", "no such key", "use the unquantised weights of the model")
    if keys.get("auto_map") is not None and keys.get("architectures") != [_ARCHITECTURE_CLASS[family]]:
        raise keys.error("auto_map", "no code shipped with the model", "choose a model that transformers itself has")
    _refuse_sliding_window(keys, family)


def _refuse_sliding_window(keys: _Keys, family: str) -> None:
    """Raise when any layer attends over a window smaller than the model's own context."""
    window = keys.optional_int("sliding_window")
    context = keys.positive_int("max_position_embeddings", _DEFAULT_MAX_POSITIONS[family])
    if family in ("qwen2", "qwen3") and not keys.boolean("use_sliding_window", False):
        window = None
    layer_types = keys.strings("layer_types")
    last_full = keys.optional_int("max_window_layers", 28)
    assert last_full is not None
    if layer_types is not None:
        unknown = sorted(set(layer_types) - {"full_attention", "sliding_attention"})
        if unknown:
            raise keys.error("layer_types", "full_attention on every layer", "choose a model with plain attention")
        in_force = "sliding_attention" in layer_types
    elif family in ("qwen2", "qwen3"):
        in_force = keys.positive_int("num_hidden_layers") > last_full
    else:
        in_force = True
    if family != "llama" and window is not None and in_force and window < context:
        raise keys.error(
            "sliding_window",
            f"null or at least max_position_embeddings ({context})",
            "sliding-window attention is not built; to use the model on shorter texts only, set "
            f"max_position_embeddings to {window} or less",
        )


def _read_head_dim(keys: _Keys, family: str, hidden_size: int, num_heads: int) -> int:
    default = 128 if family == "qwen3" else hidden_size // num_heads
    head_dim = keys.positive_int("head_dim", default)
    if keys.get("head_dim") is None and family != "qwen3" and hidden_size % num_heads:
        raise keys.error("num_attention_heads", f"a divisor of hidden_size ({hidden_size}), or a key head_dim")
    if head_dim % 2:
        raise ValueError(f"read model: {keys.source}: head_dim is {head_dim}; rotary positions need an even one")
    return head_dim


def _read_rope(keys: _Keys, family: str) -> tuple[float, dict[str, Any] | None]:
    """Return (theta, scaling) from either spelling; scaling is None or as ModelArchitecture.rope_scaling."""
    theta_default = keys.positive_float("rope_theta", _DEFAULT_ROPE_THETA[family])
    key = "rope_scaling" if keys.get("rope_scaling") is not None else "rope_parameters"
    # transformers 5 merges an old rope_scaling over rope_parameters, and takes theta from wherever it stands.
    given, fallback = keys.mapping(key), keys.mapping("rope_parameters")
    if any(isinstance(value, Mapping) for value in given.values()):
        raise keys.error(key, "one setting for all layers", "choose a model whose layers share one rotary setting")
    if given.get("partial_rotary_factor", 1.0) != 1.0:
        raise keys.error(key, "partial_rotary_factor 1.0", "choose a model that rotates the whole head")
    theta = given.get("rope_theta", fallback.get("rope_theta", theta_default))
    if not _is_positive(theta):
        raise keys.error(key, "a positive rope_theta")
    kind = given.get("rope_type", given.get("type", "default"))
    if kind == "default":
        return float(theta), None
    if not isinstance(kind, str) or kind not in _ROPE_SCALING_KEYS:
        supported = ", ".join(["default", *_ROPE_SCALING_KEYS])
        raise keys.error(key, f"rope_type of {supported}", f"scaling '{kind}' is not built; choose another model")
    scaling: dict[str, Any] = {"rope_type": kind}
    for name in _ROPE_SCALING_KEYS[kind]:
        value = given.get(name)
        if value is None and name == "original_max_position_embeddings":
            value = keys.get("max_position_embeddings", _DEFAULT_MAX_POSITIONS[family])
        if not _is_positive(value):
            raise keys.error(key, f"a positive '{name}' for rope_type '{kind}'")
        scaling[name] = value
    return float(theta), scaling


def _read_eos(keys: _Keys, generation: Mapping[str, Any]) -> tuple[int, ...]:
    ids: list[int] = []
    for value in (generation.get("eos_token_id"), keys.get("eos_token_id")):
        for token in value if isinstance(value, list) else [value]:
            if token is None:
                continue
            if not isinstance(token, int) or isinstance(token, bool):
                raise keys.error("eos_token_id", "a token id, a list of them or null")
            if token not in ids and token >= 0:
                ids.append(token)
    return tuple(ids)
