"""The model of the pipeline's tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def model(tiny_model: Callable[..., Path]) -> Path:
    """A Llama of two layers that reads bytes."""
    return tiny_model("llama", num_hidden_layers=2)
