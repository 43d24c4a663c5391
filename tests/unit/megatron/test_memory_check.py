"""A model that cannot fit is refused before it is built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from grpo_mc.config import load_config_text
from grpo_mc.megatron import memory_check
from grpo_mc.megatron.hf_config import ModelArchitecture
from grpo_mc.megatron.memory_check import check_memory

# 2 layers of (4 * 8 * 8 attention + 3 * 8 * 16 MLP + 2 * 8 norms), 100 * 8 embeddings, tied. The estimate of
# a rank leaves the last norm out.
ARCHITECTURE = ModelArchitecture(
    family="llama", num_layers=2, hidden_size=8, ffn_hidden_size=16, num_heads=2, num_kv_heads=2, head_dim=4,
    vocab_size=100, rope_theta=1e4, rms_norm_eps=1e-6, tie_word_embeddings=True, max_positions=64,
)  # fmt: skip
PARAMETERS = 2 * (4 * 8 * 8 + 3 * 8 * 16 + 2 * 8) + 100 * 8


def configuration(*overrides: str) -> Any:
    return load_config_text("model: {path: some/model}\nrun: {dir: none, steps: 0}\n", list(overrides))


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """`memory(n)`: the machine has n bytes, and no accelerator."""
    monkeypatch.setattr(memory_check.torch.cuda, "is_available", lambda: False)
    return lambda size: monkeypatch.setattr(memory_check, "total_memory", lambda: size)


@pytest.mark.parametrize(
    ("trains", "overrides", "bytes_per_parameter"),
    [
        (False, (), 4),
        (True, (), 4 + 4 + 8),
        (True, ("algorithm.beta=0.1",), 4 + 4 + 8 + 4),
        (True, ("model.dtype=bf16",), 2 + 4 + 12),
    ],
)
def test_what_stays_must_fit(
    memory: Callable[[int], None], trains: bool, overrides: tuple[str, ...], bytes_per_parameter: int
) -> None:
    needed = bytes_per_parameter * PARAMETERS
    config = configuration(*overrides)
    memory(needed)
    check_memory(config, ARCHITECTURE, trains=trains)
    memory(needed - 1)
    with pytest.raises(ValueError, match=r"^memory: the weights.* need .* GB and this machine has .*some/model"):
        check_memory(config, ARCHITECTURE, trains=trains)


def test_processes_of_one_machine_share_its_memory(
    memory: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    memory(2 * 4 * PARAMETERS - 1)
    with pytest.raises(ValueError, match="processes here: 2;"):
        check_memory(configuration(), ARCHITECTURE, trains=False)


def test_a_model_of_absurd_size_is_refused_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_check.torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="^memory: .*choose a smaller model"):
        check_memory(configuration(), replace(ARCHITECTURE, hidden_size=2**40), trains=True)
