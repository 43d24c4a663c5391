"""Fixtures for every test: tiny model folders, free ports, processes with a bound.

The pieces themselves are in tests/helpers and can be imported (`from helpers.processes import run_distributed`).
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Before torch is imported: the suite shares the machine, and tiny tensors gain nothing from threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest

from helpers import processes, tiny_models

if os.environ.get("GRPO_MC_TEST_EMULATED"):  # set by tests/cuda: every operator runs its CUDA kernels on the CPU
    import torch

    import grpo_mc.ops as _operators  # noqa: F401  (loads the library)
    from helpers import cuda_emulator

    torch.ops.grpo_mc.load_cuda(str(cuda_emulator.library()), True)

elif os.environ.get("GRPO_MC_TEST_CUDA"):  # set by tests/gpu: every operator runs on the GPU
    import grpo_mc.ops as _operators  # noqa: F401  (loads the library)
    from helpers import on_cuda

    on_cuda.route_to_cuda()

MAX_THREADS = 200
"""Three meshes' worth."""


@pytest.fixture(autouse=True)
def few_threads() -> Iterator[None]:
    """Ends the threads of process groups that are over: they live as long as a model (a cycle) refers to them.

    Hundreds of them would slow down every test that follows.
    """
    yield
    if len(os.listdir("/proc/self/task")) > MAX_THREADS:
        gc.collect()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny_model(family="llama", seed=0, **config_fields)`: a model folder, built once a session per arguments."""
    built: dict[tuple[Any, ...], Path] = {}

    def build(family: str = "llama", seed: int = 0, **changes: Any) -> Path:
        key = (family, seed, *sorted(changes.items()))
        if key not in built:
            folder = tmp_path_factory.mktemp(f"tiny-{family}")
            built[key] = tiny_models.build_tiny_model(folder, family, seed=seed, **changes)
        return built[key]

    return build


@pytest.fixture(scope="session", params=tiny_models.FAMILIES)
def family_model(request: pytest.FixtureRequest, tiny_model: Callable[..., Path]) -> tuple[str, Path]:
    """Each model family in turn: (family, folder)."""
    return request.param, tiny_model(request.param)


@pytest.fixture
def free_port() -> int:
    """A TCP port of localhost that was free a moment ago."""
    return processes.free_port()


@pytest.fixture(scope="session")
def run_distributed() -> Callable[..., list[Any]]:
    """helpers.processes.run_distributed: a function on real gloo processes, with a bound."""
    return processes.run_distributed


@pytest.fixture(scope="session")
def torchrun() -> Callable[..., processes.Finished]:
    """helpers.processes.torchrun: a command line under torchrun, with a bound."""
    return processes.torchrun
