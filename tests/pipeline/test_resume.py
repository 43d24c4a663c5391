"""A run that stops anywhere and goes on is the run that never stopped, bit for bit (H24 for the whole pipeline)."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from grpo_mc.pipeline.rollout_log import read_rollouts
from grpo_mc.pipeline.stop import Interrupted
from helpers.runs import comparable, model_bytes, own_environment, read_lines, run, run_with_files, tiny_config

EVALUATION = (
    "{kind: reasoning_gym, task: chain_sum, size: 3, seed: 7, template: '{expression} =', chat: false, options:"
    " {min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1}}"
)
OVERRIDES = (
    "run.steps=4", "algorithm.epochs=2", "algorithm.minibatches=2", "algorithm.beta=0.05", "optimizer.schedule=cosine",
    "optimizer.warmup_steps=1", "algorithm.filter_zero_variance=true", "algorithm.max_refills=1",
    f"evaluation.source={EVALUATION}", "evaluation.every=2", "checkpoint.every=2", "data.train.size=7",
)  # fmt: skip
"""Everything that a resume could get wrong: a schedule, several optimizer steps, refills, epochs of the data that end
inside a batch, evaluations between steps, fewer checkpoints than steps."""


def facts(run_dir: Path) -> dict[str, Any]:
    """All that must be the same in two runs."""
    rollouts = {
        step: [(r.group_id, r.sample_index, r.text, r.reward, r.policy_versions) for g in groups for r in g.rollouts]
        for step, groups in read_rollouts(run_dir)
    }
    return {
        "metrics": comparable(read_lines(run_dir / "metrics.jsonl")),
        "evaluations": read_lines(run_dir / "evaluations.jsonl"),
        "rollouts": rollouts,
        "samples": [{**line, "verdicts": None} for line in read_lines(run_dir / "samples.jsonl")],
        "model": model_bytes(run_dir),
        "checkpoints": sorted(path.name for path in (run_dir / "checkpoints").iterdir()),
    }


@pytest.fixture(scope="module")
def uninterrupted(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("uninterrupted")
    run_with_files(tiny_config(model, folder, *OVERRIDES))
    found = facts(folder)
    assert [line["step"] for line in found["evaluations"]] == [0, 2, 4]
    assert all(line["grad/norm"] > 0 for line in found["metrics"]), "it must train for the test to mean much"
    return found


def run_until(config: Any, stage: str, steps_done: int, *, resume: bool = False) -> str:
    """Runs with files and sends this process SIGTERM as a stage begins; returns what Interrupted says."""
    from grpo_mc.cli.calls import mark_resumed
    from grpo_mc.monitor import RunMonitor
    from grpo_mc.pipeline.run import train

    class Signalling(RunMonitor):
        done = 0

        def stage(self, name: str) -> None:
            if (name, self.done) == (stage, steps_done):
                os.kill(os.getpid(), signal.SIGTERM)

        def step(self, step: int, metrics: Any) -> None:
            super().step(step, metrics)
            self.done = step

        def resume(self, step: int) -> None:
            super().resume(step)
            self.done = step

    config = mark_resumed(config) if resume else config
    with own_environment(), Signalling(config.run.dir, config) as monitor, pytest.raises(Interrupted) as caught:
        train(config, resume_dir=Path(config.run.dir) if resume else None, sink=monitor)
    assert caught.value.exit_status == 143
    return str(caught.value)


@pytest.mark.parametrize(
    ("stage", "steps_done", "saved"),
    [
        ("evaluation", 0, 0),  # before anything: the evaluation is not made twice
        ("rewards", 1, 1),  # given up: the same prompts are drawn again
        ("inference", 2, 2),
        ("train", 1, 2),  # finished, but the evaluation that is due after it waits for the resume
        ("evaluation", 2, 2),
        ("train", 3, 4),
        ("evaluation", 4, 4),  # only the export is left
    ],
)
def test_stopped_at_any_stage_and_resumed_is_the_uninterrupted_run(
    model: Path, tmp_path: Path, uninterrupted: dict[str, Any], stage: str, steps_done: int, saved: int
) -> None:
    config = tiny_config(model, tmp_path, *OVERRIDES)
    message = run_until(config, stage, steps_done)
    assert message == (
        f"stopped by SIGTERM after step {saved}, which is saved; go on with `grpo-mc train --resume {tmp_path}`"
    )
    assert (tmp_path / f"checkpoints/step_{saved}/COMPLETE").is_file()
    run_with_files(config, resume=True)
    found = facts(tmp_path)
    extra = {f"step_{saved}"} - set(uninterrupted["checkpoints"])
    assert set(found.pop("checkpoints")) <= set(uninterrupted["checkpoints"]) | extra
    assert found == {name: value for name, value in uninterrupted.items() if name != "checkpoints"}


def test_resumed_twice(model: Path, tmp_path: Path, uninterrupted: dict[str, Any]) -> None:
    config = tiny_config(model, tmp_path, *OVERRIDES)
    run_until(config, "rollout", 1)
    run_until(config, "train", 2, resume=True)
    run_with_files(config, resume=True)
    assert facts(tmp_path)["metrics"] == uninterrupted["metrics"]
    assert model_bytes(tmp_path) == uninterrupted["model"]


def test_states_of_four_bits_are_resumed_bit_for_bit(model: Path, tmp_path: Path) -> None:
    """Their codes are rounded at random, by numbers that belong to the step."""
    fused = (*OVERRIDES, "optimizer.kind=fused_adamw", "optimizer.states=int4")
    whole, stopped = (tiny_config(model, tmp_path / name, *fused) for name in ("whole", "stopped"))
    run_with_files(whole)
    run_until(stopped, "train", 2)
    run_with_files(stopped, resume=True)
    wanted, found = (facts(Path(config.run.dir)) for config in (whole, stopped))
    for name in ("metrics", "evaluations", "rollouts", "samples", "model"):
        assert found[name] == wanted[name], name
    other = tiny_config(model, tmp_path / "stopped", *OVERRIDES, "run.steps=5")
    with pytest.raises(ValueError, match="saved with optimizer.states = 'int4' but the configuration has 'fp32'"):
        run_with_files(other, resume=True)


def killed(model: Path, folder: Path, steps_done: int) -> Path:
    """The run directory as it is at a moment in the middle of a step is what a killed process leaves."""
    image, source = folder / "killed", folder / "run"

    def copy(stage: str, done: int) -> None:
        if (stage, done) == ("train", steps_done):
            shutil.copytree(source, image)

    from grpo_mc.monitor import RunMonitor
    from grpo_mc.pipeline.run import train

    class Copying(RunMonitor):
        done = 0

        def stage(self, name: str) -> None:
            copy(name, self.done)

        def step(self, step: int, metrics: Any) -> None:
            super().step(step, metrics)
            self.done = step

    config = tiny_config(model, source, *OVERRIDES)
    with own_environment(), Copying(source, config) as monitor:
        train(config, resume_dir=None, sink=monitor)
    return image


@pytest.mark.parametrize("steps_done", [0, 3])
def test_killed_without_notice_it_goes_on_from_the_last_checkpoint(
    model: Path, tmp_path: Path, uninterrupted: dict[str, Any], steps_done: int
) -> None:
    image = killed(model, tmp_path, steps_done)
    with open(image / "metrics.jsonl", "a") as torn:
        torn.write('{"step": 9, "rew')
    run_with_files(tiny_config(model, image, *OVERRIDES), resume=True)
    found = facts(image)
    assert found.pop("checkpoints") == (["step_2", "step_4"])
    assert found == {name: value for name, value in uninterrupted.items() if name != "checkpoints"}


def test_a_resume_without_a_checkpoint_keeps_the_records_and_says_what_to_do(model: Path, tmp_path: Path) -> None:
    image = killed(model, tmp_path, steps_done=1)
    (image / "checkpoints/step_1").mkdir(parents=True)
    before = {path: path.read_bytes() for path in image.rglob("*") if path.is_file() and path.name != "run.lock"}
    assert {path.name for path in before} > {"metrics.jsonl", "step_00000001.parquet"}
    with pytest.raises(ValueError) as caught:
        run_with_files(tiny_config(model, image, *OVERRIDES), resume=True)
    assert str(caught.value) == (
        f"train --resume: {image} has no complete checkpoint to go on from; step_1 is ignored: COMPLETE is missing (the"
        " save did not end). It holds 1 recorded steps, which a start from step 0 would remove; start a new run with"
        f" another run.dir, or delete {image}"
    )
    assert {path: path.read_bytes() for path in before} == before


def test_the_checkpoint_just_saved_stays_beside_older_ones_of_higher_steps(model: Path, tmp_path: Path) -> None:
    config = tiny_config(model, tmp_path, "run.steps=1", "checkpoint.keep_last=1")
    run(config)
    shutil.copytree(tmp_path / "checkpoints/step_1", tmp_path / "checkpoints/step_50")
    for name in ("checkpoints/step_1", "rollouts"):
        shutil.rmtree(tmp_path / name)
    run(config)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step_1", "step_50"]


def test_more_steps_on_resume_go_on_along_the_longer_schedule(model: Path, tmp_path: Path) -> None:
    config = tiny_config(model, tmp_path, "run.steps=2", "optimizer.schedule=linear", "optimizer.lr=1e-3")
    run(config)
    longer = tiny_config(model, tmp_path, "run.steps=4", "optimizer.schedule=linear", "optimizer.lr=1e-3")
    result, sink = run(longer, resume=True)
    assert result.steps == 4
    assert [line["step"] for line in sink.metrics] == [3, 4]
    assert [line["optimizer/lr"] for line in sink.metrics] == pytest.approx([1e-3 / 3, 0])
    again, sink = run(longer, resume=True)
    assert again.steps == 4 and sink.metrics == [], "a finished run has nothing left to do"
    from grpo_mc.config import load_config

    assert load_config(tmp_path / "config.yaml").run.steps == 4, "the next resume goes on to the same end"


def test_a_checkpoint_of_another_seed_is_refused(model: Path, tmp_path: Path) -> None:
    run(tiny_config(model, tmp_path, "run.steps=1"))
    with pytest.raises(ValueError, match="seed 0 \\(now 5\\)"):
        run(tiny_config(model, tmp_path, "run.steps=2", "run.seed=5"), resume=True)
