"""Presets: exact values, and that they fill only what is not set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from grpo_mc.config import PRESETS, load_config_text, resolve

Refusal = Callable[..., str]

EXPECTED: dict[str, dict[str, Any]] = {
    "grpo": {"baseline": "mean", "scale": "std", "ddof": 0, "aggregation": "sequence_mean_token_mean", "kl": "k3",
             "kl_placement": "in_loss", "beta": 0.04, "clip_low": 0.2, "clip_high": 0.2},
    "dr_grpo": {"baseline": "mean", "scale": "none", "aggregation": "sequence_mean_token_sum_norm", "beta": 0.0},
    "dapo": {"clip_low": 0.2, "clip_high": 0.28, "aggregation": "token_mean", "beta": 0.0,
             "filter_zero_variance": True, "overlong_penalty": 1.0},
    "gspo": {"loss": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "sequence_mean_token_mean"},
    "cispo": {"loss": "cispo", "aggregation": "token_mean", "clip_low": 1.0, "clip_high": 4.0, "beta": 0.0},
    "rloo": {"baseline": "leave_one_out", "scale": "none", "loss": "reinforce"},
    "reinforce_plus_plus": {"scale": "batch_std", "kl_placement": "in_reward", "kl": "k1", "beta": 0.01},
    "trl": {"ddof": 1, "eps": 1e-4, "aggregation": "token_mean", "beta": 0.0, "clip_low": 0.2, "clip_high": 0.2},
    "verl": {"ddof": 1, "eps": 1e-6, "aggregation": "token_mean", "beta": 0.0, "dual_clip": 3.0},
    "slime": {"ddof": 1, "eps": 1e-6, "aggregation": "sequence_mean_token_mean", "beta": 0.0},
    "nemo_rl": {"baseline": "leave_one_out", "scale": "leave_one_out_std", "eps": 1e-6, "aggregation": "token_mean",
                "beta": 0.01, "kl": "k3"},
    "megatron_rl": {"ddof": 0, "eps": 1e-4, "clip_low": 0.01, "clip_high": 0.01, "kl": "k3", "beta": 0.001,
                    "epochs": 2},
}  # fmt: skip
GROUP_SIZES = {"grpo": 16, "dapo": 16, "trl": 8, "nemo_rl": 16, "megatron_rl": 2}


def test_presets_are_those_named() -> None:
    assert set(PRESETS) == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_preset_values(minimal: str, name: str) -> None:
    config = load_config_text(minimal, [f"algorithm.preset={name}"])
    got = config.algorithm.model_dump()
    assert {key: got[key] for key in EXPECTED[name]} == EXPECTED[name]
    assert config.rollout.group_size == GROUP_SIZES.get(name, 8)
    assert resolve(config) == config


@pytest.mark.parametrize("preset", PRESETS.values(), ids=lambda p: p.name)
def test_preset_sets_every_field_its_source_decides(preset: Any) -> None:
    """So that a later change of a default changes no preset."""
    assert set(PRESETS["grpo"].algorithm) <= set(preset.algorithm)


def test_explicit_fields_win(minimal: str) -> None:
    """A value equal to the default still counts as set."""
    text = minimal + "algorithm: {preset: dapo, clip_high: 0.2, overlong_buffer: null}\nrollout: {group_size: 4}\n"
    config = load_config_text(text)
    assert config.algorithm.clip_high == 0.2
    assert config.algorithm.overlong_buffer is None
    assert config.rollout.group_size == 4
    assert config.algorithm.aggregation == "token_mean"


@pytest.mark.parametrize(("max_new_tokens", "buffer"), [(20480, 4096), (256, 51), (5, 1), (4, None)])
def test_dapo_buffer_is_the_last_fifth(minimal: str, max_new_tokens: int, buffer: int | None) -> None:
    """The paper's 4096 of 20480 tokens."""
    config = load_config_text(minimal, ["algorithm.preset=dapo", f"rollout.max_new_tokens={max_new_tokens}"])
    assert config.algorithm.overlong_buffer == buffer


@pytest.mark.parametrize(
    ("given", "near"), [("dr-grpo", "dr_grpo"), ("DAPO", "dapo"), ("gsop", "gspo"), ("Dr.GRPO", "dr_grpo")]
)
def test_unknown_preset_names_the_nearest(refusal: Refusal, minimal: str, given: str, near: str) -> None:
    message = refusal(minimal + f"algorithm:\n  preset: {given}\n")
    assert f"algorithm.preset is '{given}', which is no preset; did you mean '{near}'?" in message
    assert message.endswith("(a.yaml, line 11)")


def test_norm_length_follows_the_response_length(minimal: str) -> None:
    text = minimal + "rollout: {max_new_tokens: 100}\n"
    assert load_config_text(text, ["algorithm.preset=dr_grpo"]).algorithm.norm_length == 100
    assert load_config_text(text, ["algorithm.norm_length=7"]).algorithm.norm_length == 7
