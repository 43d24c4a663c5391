"""The layout changes nothing but speed: dp, tp and pp give the groups, rewards, losses and weights of one process.

Random numbers are keyed by group, sample and position, and the global batch does not depend on the layout, so that in
float32 the tokens are equal as well. (They could differ where rounding moves a probability over a random number; with
the seeds here it does not.)
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.processes import free_port, run_distributed
from helpers.runs import comparable, own_environment, run, tiny_config

pytestmark = pytest.mark.dist

OBJECTIVE = (
    "algorithm.epochs=2", "algorithm.minibatches=2", "algorithm.beta=0.05", "run.steps=2", "optimizer.eps=0.01",
)  # fmt: skip
"""With the usual eps Adam makes a whole step of a gradient that is nothing but rounding."""
LAYOUTS = {"dp2": ("parallel.dp=2",), "tp2": ("parallel.tp=2",), "pp2": ("parallel.pp=2",)}
ROUNDED = ("loss", "grad/norm", "policy/", "mismatch/", "advantage/", "reward/std")
"""Metrics that rounding reaches; the others are equal."""
STOPPED = ("algorithm.beta=0.05", "checkpoint.every=1", "run.steps=3")


def outcome(config: Any, **options: Any) -> dict[str, Any]:
    """Metrics, sampled tokens, and the exported weights (on rank 0) of a run."""
    from safetensors.numpy import load_file

    result, sink = run(config, **options)
    tokens = [
        {(r.group_id, r.sample_index): r.response_ids.tolist() for group in groups for r in group.rollouts}
        for groups in sink.groups
    ]
    weights = load_file(result.model_dir / "model.safetensors") if os.environ["RANK"] == "0" else {}
    return {"metrics": comparable(sink.metrics), "tokens": tokens, "weights": weights}


def in_two_processes(model: Path, folder: Path, ports: list[int]) -> dict[str, dict[str, Any]]:
    """Each layout in turn, then a dp=2 run that is stopped and resumed. Runs in every rank."""
    found = {}
    for name, overrides in LAYOUTS.items():
        os.environ["MASTER_PORT"] = str(ports.pop())
        found[name] = outcome(tiny_config(model, folder / name, *OBJECTIVE, *overrides))
    os.environ["MASTER_PORT"] = str(ports.pop())
    found["uninterrupted"] = outcome(tiny_config(model, folder / "uninterrupted", *STOPPED))
    os.environ["MASTER_PORT"] = str(ports.pop())
    found["stopped"] = {"message": stop_rank_one(tiny_config(model, folder / "stopped", *STOPPED))}
    os.environ["MASTER_PORT"] = str(ports.pop())
    found["resumed"] = outcome(tiny_config(model, folder / "stopped", *STOPPED), resume=True)
    return found


def stop_rank_one(config: Any) -> str:
    """SIGTERM reaches one rank only, in the middle of sampling; returns what the run says on this one."""
    from grpo_mc.pipeline.stop import Interrupted

    def on_stage(name: str, steps_done: int) -> None:
        if os.environ["RANK"] == "1" and (name, steps_done) == ("rewards", 1):
            os.kill(os.getpid(), signal.SIGTERM)

    with own_environment():
        try:
            run(config, on_stage=on_stage)
        except Interrupted as stop:
            return str(stop)
    return "not stopped"


@pytest.fixture(scope="module")
def found(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    """[rank] -> what in_two_processes returns."""
    folder = tmp_path_factory.mktemp("layouts")
    ports = [free_port() for _ in range(len(LAYOUTS) + 3)]
    return run_distributed(in_two_processes, 2, tiny_model(), folder, ports, init=False, timeout_s=300)


@pytest.fixture(scope="module")
def alone(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The same run in this process."""
    with own_environment():
        os.environ["RANK"] = "0"
        os.environ.update(WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
        return outcome(tiny_config(tiny_model(), tmp_path_factory.mktemp("alone"), *OBJECTIVE))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_samples_and_scores_the_same(
    found: list[dict[str, dict[str, Any]]], alone: dict[str, Any], layout: str
) -> None:
    for rank in (0, 1):
        assert found[rank][layout]["tokens"] == alone["tokens"], f"rank {rank}"
        for ours, theirs in zip(found[rank][layout]["metrics"], alone["metrics"], strict=True):
            assert ours.keys() == theirs.keys()
            exact = {name for name in theirs if not name.startswith(ROUNDED)}
            assert {n: ours[n] for n in exact} == {n: theirs[n] for n in exact}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_trains_the_same(found: list[dict[str, dict[str, Any]]], alone: dict[str, Any], layout: str) -> None:
    for ours, theirs in zip(found[0][layout]["metrics"], alone["metrics"], strict=True):
        for name in (name for name in theirs if name.startswith(ROUNDED)):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-5), name
    moved = found[0][layout]["weights"]
    assert moved.keys() == alone["weights"].keys()
    for name, theirs in alone["weights"].items():
        difference = np.linalg.norm(moved[name] - theirs) / np.linalg.norm(theirs)
        assert difference < 1e-6, f"{name}: relative difference {difference:.2e}"


def test_all_ranks_know_the_same(found: list[dict[str, dict[str, Any]]]) -> None:
    for layout in LAYOUTS:
        assert found[0][layout]["metrics"] == found[1][layout]["metrics"], layout
        assert found[0][layout]["tokens"] == found[1][layout]["tokens"], layout


def test_a_signal_to_one_rank_stops_all_and_the_resumed_run_is_the_uninterrupted_one(
    found: list[dict[str, dict[str, Any]]],
) -> None:
    for rank in (0, 1):
        assert "stopped by SIGTERM after step 1, which is saved" in found[rank]["stopped"]["message"]
        assert found[rank]["resumed"]["metrics"] == found[rank]["uninterrupted"]["metrics"][1:]
    ours, theirs = found[0]["resumed"]["weights"], found[0]["uninterrupted"]["weights"]
    assert ours.keys() == theirs.keys() and all((ours[name] == theirs[name]).all() for name in theirs)
