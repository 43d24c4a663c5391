"""Fixtures of the rollout tests: a mesh of one process, and engines on tiny models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.engines import load_policy, single_mesh


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    """One process."""
    with single_mesh() as built:
        yield built


@pytest.fixture(scope="module")
def policy(mesh: Any, tiny_model: Callable[..., Path]) -> Callable[..., Any]:
    """`policy(family="llama", dtype="fp32", **config_fields)`: (model, tokenizer), loaded once a module."""
    from grpo_mc.data.tokenizer import load_tokenizer

    loaded: dict[Any, Any] = {}

    def load(family: str = "llama", dtype: str = "fp32", **changes: Any) -> Any:
        key = (family, dtype, *sorted(changes.items()))
        if key not in loaded:
            folder = tiny_model(family, **changes)
            loaded[key] = load_policy(folder, mesh, dtype=dtype), load_tokenizer(folder)
        return loaded[key]

    return load


@pytest.fixture(scope="module")
def make_engine(mesh: Any, policy: Callable[..., Any]) -> Callable[..., Any]:
    """`make_engine(family="llama", dtype="fp32", seed=0, **engine_options)`."""
    from grpo_mc.rollout.native import NativeEngine

    def make(family: str = "llama", dtype: str = "fp32", seed: int = 0, **options: Any) -> Any:
        model, tokenizer = policy(family, dtype)
        return NativeEngine(model, mesh, tokenizer, seed=seed, **options)

    return make
