"""A run with compressed gradients that stops and goes on is the run that never stopped, bit for bit."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from helpers.processes import free_port, run_distributed
from helpers.runs import comparable, own_environment, run, tiny_config

pytestmark = pytest.mark.dist

SETTINGS = ("algorithm.epochs=2", "algorithm.minibatches=2", "checkpoint.every=2", "run.steps=4", "optimizer.lr=1e-3")
COMPRESSED = "parallel.grad_compression=int4"


def outcome(config: Any, port: int, *, resume: bool = False) -> dict[str, Any]:
    """Metrics, and on rank 0 the exported weights, of a run in two processes."""
    os.environ["MASTER_PORT"] = str(port)
    result, sink = run(config, resume=resume)
    weights = (result.model_dir / "model.safetensors").read_bytes() if os.environ["RANK"] == "0" else b""
    return {"metrics": comparable(sink.metrics), "weights": weights}


def stopped_after_two(config: Any, port: int) -> str:
    """Ends the run after its second step; returns what it says."""
    from grpo_mc.pipeline.stop import Interrupted

    def on_stage(name: str, steps_done: int) -> None:
        if (name, steps_done) == ("rewards", 2):
            os.kill(os.getpid(), signal.SIGTERM)

    os.environ["MASTER_PORT"] = str(port)
    with own_environment(), pytest.raises(Interrupted) as caught:
        run(config, on_stage=on_stage)
    return str(caught.value)


def in_two_processes(model: Path, folder: Path, ports: list[int]) -> dict[str, Any]:
    """The run whole, uncompressed, resumed, and resumed without what was left over."""
    from grpo_mc.megatron import checkpoint

    found: dict[str, Any] = {"exact": outcome(tiny_config(model, folder / "exact", *SETTINGS), ports.pop())}
    config = tiny_config(model, folder / "whole", *SETTINGS, COMPRESSED)
    found["whole"] = outcome(config, ports.pop())
    for name in ("resumed", "forgetful"):
        config = tiny_config(model, folder / name, *SETTINGS, COMPRESSED)
        found[f"{name} message"] = stopped_after_two(config, ports.pop())
        if name == "resumed":
            found[name] = outcome(config, ports.pop(), resume=True)
            continue
        with mock.patch.object(checkpoint, "_compression", lambda *_: None):  # as for another layout
            found[name] = outcome(config, ports.pop(), resume=True)
    return found


def test_a_resumed_run_is_the_uninterrupted_one(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    ports = [free_port() for _ in range(6)]
    results = run_distributed(in_two_processes, 2, tiny_model(), tmp_path, ports, init=False, timeout_s=400)
    for found in results:
        for name in ("resumed", "forgetful"):
            assert "after step 2, which is saved" in found[f"{name} message"]
        assert found["resumed"]["metrics"] == found["whole"]["metrics"][2:]
        assert found["forgetful"]["metrics"] != found["whole"]["metrics"][2:], "what was left over must count"
        assert found["exact"]["metrics"] != found["whole"]["metrics"], "the option must do something"
    weights = {name: results[0][name]["weights"] for name in ("exact", "whole", "resumed", "forgetful")}
    assert weights["resumed"] == weights["whole"]
    assert weights["forgetful"] != weights["whole"] and weights["exact"] != weights["whole"]
