"""Which warnings of libraries a command shows, and our notes."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_mc.cli import notices

MAX_CONNECTIONS = (
    "When using sequence parallelism it is recommended to set the environment variable CUDA_DEVICE_MAX_CONNECTIONS to 1"
    " for maximum speedup"
)
DEPRECATED = "`torch.distributed.%s` is deprecated. Please use `torch.distributed.%s` instead."
GATHER = DEPRECATED % ("all_gather_into_tensor", "all_gather_single")
SCATTER = DEPRECATED % ("reduce_scatter_tensor", "reduce_scatter_single")


@pytest.fixture(autouse=True)
def own_loggers() -> Iterator[None]:
    """Loggers as in a program that set up none, before and after."""
    loggers = [logging.getLogger(name) for name in notices.SHOWN_NOTES]
    for logger in loggers:
        logger.setLevel(logging.NOTSET)
        logger.handlers = []
    yield
    for logger in loggers:
        logger.setLevel(logging.NOTSET)
        logger.handlers = []


def is_shown(text: str, category: type[Warning], module: str) -> bool:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        notices.set_up_notices()
        warnings.warn_explicit(text, category, f"{module}.py", 1, module=module)
    return bool(seen)


@pytest.mark.parametrize(
    ("text", "category", "module", "expected"),
    [
        (GATHER, FutureWarning, "torch.distributed.c10d_logger", False),
        (SCATTER, FutureWarning, "torch.distributed.c10d_logger", False),
        (SCATTER, FutureWarning, "megatron.core.tensor_parallel.mappings", False),
        (GATHER, FutureWarning, "grpo_mc.megatron.gradients", False),
        (GATHER, FutureWarning, "my_reward", True),
        (DEPRECATED % ("barrier", "x"), FutureWarning, "torch.distributed.c10d_logger", True),
        (MAX_CONNECTIONS, UserWarning, "megatron.core.tensor_parallel.layers", False),
        (MAX_CONNECTIONS, UserWarning, "my_layers", True),
        ("Transformer Engine and Apex are not installed. Falling back to Torch Norm", UserWarning,
         "megatron.core.models.gpt", False),
        ("overflow", RuntimeWarning, "megatron.core.optimizer", True),
    ],
)  # fmt: skip
def test_only_named_warnings_of_named_modules_are_left_out(
    text: str, category: type[Warning], module: str, expected: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(notices, "GPU_DRIVER", tmp_path / "none")
    assert is_shown(text, category, module) is expected


def test_the_order_of_kernels_matters_on_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(notices, "GPU_DRIVER", tmp_path)
    assert is_shown(MAX_CONNECTIONS, UserWarning, "megatron.core.tensor_parallel.layers")


def test_the_import_of_a_model_is_said_once(capsys: Any) -> None:
    logger = logging.getLogger("grpo_mc.megatron.checkpoint_cache")
    logger.info("nobody asked for this")
    notices.set_up_notices()
    notices.set_up_notices()
    logger.info("importing %s (once; kept in %s)", "tiny.gguf", "cache")
    assert capsys.readouterr().err == "grpo-mc: importing tiny.gguf (once; kept in cache)\n"
