"""Batches with nothing to train on (H08): no optimizer step, counted, said, and bounded."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_mc.pipeline.stall import MAX_EMPTY_BATCHES, MAX_NON_FINITE_BATCHES, NothingToTrain, RunStalled, StallWatch
from helpers.runs import model_bytes, run, tiny_config

TRAINED = {"optimizer/steps": 1.0, "optimizer/non_finite_steps": 0.0}
EMPTY = {"optimizer/steps": 0.0, "optimizer/non_finite_steps": 0.0, "filter/sampled_groups": 4.0}
NON_FINITE = {"optimizer/steps": 0.0, "optimizer/non_finite_steps": 2.0}


def test_empty_batches_warn_ever_more_rarely_and_end_the_run_at_the_bound() -> None:
    watch = StallWatch()
    metrics = {**EMPTY, "filter/filtered_groups": 4.0}
    warned = [step for step in range(1, MAX_EMPTY_BATCHES) if watch.after_step(step, metrics)]
    assert warned == [1, 2, 4, 8, 16, 32]
    with pytest.raises(NothingToTrain, match="50 batches in a row were empty.*algorithm.filter_zero_variance=false"):
        watch.after_step(MAX_EMPTY_BATCHES, metrics)


def test_a_batch_that_trains_starts_the_count_anew_and_the_count_survives_a_resume() -> None:
    watch = StallWatch()
    watch.after_step(1, EMPTY)
    assert watch.after_step(2, TRAINED) is None
    message = watch.after_step(3, EMPTY)
    assert message is not None and "(1 in a row)" in message
    resumed = StallWatch()
    resumed.load_state_dict(watch.state_dict())
    message = resumed.after_step(4, EMPTY)
    assert message is not None and "(2 in a row)" in message


def test_gradients_that_are_never_finite_end_the_run() -> None:
    watch = StallWatch()
    for step in range(1, MAX_NON_FINITE_BATCHES):
        message = watch.after_step(step, NON_FINITE)
        assert message is not None and "not finite in 2 optimizer steps" in message
    with pytest.raises(RunStalled, match="lower optimizer.lr.*checkpoint before step 1 "):
        watch.after_step(MAX_NON_FINITE_BATCHES, NON_FINITE)
    assert not issubclass(RunStalled, NothingToTrain), "its weights are not saved over good ones"


@pytest.mark.parametrize(
    ("metrics", "cause", "advice"),
    [
        ({"filter/filtered_groups": 4.0}, "4 were left out for equal rewards", "rollout.group_size"),
        ({"filter/dropped_groups": 4.0}, "4 for fewer than two scored", "grpo-mc rewards score"),
        ({"filter/kept_groups": 4.0, "rollouts/truncated_masked": 16.0}, "16 truncated", "rollout.max_new_tokens"),
    ],
)
def test_the_message_names_the_cause(metrics: dict[str, float], cause: str, advice: str) -> None:
    message = StallWatch().after_step(7, {**EMPTY, **metrics})
    assert message is not None and message.startswith("step 7 has nothing to train on")
    assert cause in message and advice in message


@pytest.fixture(scope="module")
def start(model: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The exported weights of a run of no steps."""
    folder = tmp_path_factory.mktemp("start")
    run(tiny_config(model, folder, "run.steps=0"))
    return model_bytes(folder)


FILTERED = ("algorithm.filter_zero_variance=true", "rewards.functions=[{type: regex, pattern: '(?s).*'}]")
MASKED = ("algorithm.mask_truncated=true", "rollout.ignore_eos=true")


@pytest.mark.parametrize("overrides", [(*FILTERED, "algorithm.max_refills=2"), MASKED], ids=["filtered", "masked"])
def test_an_empty_batch_changes_nothing(model: Path, tmp_path: Path, start: bytes, overrides: tuple[str, ...]) -> None:
    more = ("optimizer.weight_decay=0.1", "algorithm.minibatches=2", "algorithm.beta=0.1", "run.steps=2")
    result, sink = run(tiny_config(model, tmp_path, *overrides, *more))
    assert result.steps == 2
    for line in sink.metrics:
        assert (line["optimizer/steps"], line["optimizer/empty_steps"]) == (0, 2)
        assert "grad/norm" not in line and "loss" not in line
    assert [line["policy/version"] for line in sink.metrics] == [1, 2]
    assert [line["filter/rounds"] for line in sink.metrics] == ([3, 3] if "=2" in overrides[-1] else [1, 1])
    warnings = [message for message in sink.messages if "nothing to train on" in message]
    assert len(warnings) == 2 and warnings[0].startswith("warning: step 1 ")
    assert model_bytes(tmp_path) == start


def test_a_run_that_only_meets_empty_batches_saves_and_ends(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grpo_mc.pipeline.stall.MAX_EMPTY_BATCHES", 2)
    with pytest.raises(NothingToTrain, match="2 batches in a row were empty; in step 2, of 4 groups 4 were left out"):
        run(tiny_config(model, tmp_path, *FILTERED, "run.steps=9"))
    assert (tmp_path / "checkpoints/step_2/COMPLETE").is_file()
