"""pipeline.mode: sampling without training, and training on what an earlier run sampled."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_mc.pipeline.rollout_log import RolloutLog, read_rollouts
from helpers.runs import comparable, model_bytes, run, tiny_config

HARD = ("algorithm.epochs=2", "algorithm.minibatches=2", "algorithm.beta=0.05", "algorithm.filter_zero_variance=true")
"""An objective with several optimizer steps per batch, reference log-probs and a filter."""


@pytest.fixture(scope="module")
def recorded(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, float]]]:
    """A run directory and its metrics."""
    folder = tmp_path_factory.mktemp("recorded")
    _, sink = run(tiny_config(model, folder, *HARD))
    assert sum(line["optimizer/steps"] for line in sink.metrics) > 6, "it must have trained for the test to mean much"
    return folder, sink.metrics


def test_replayed_rollouts_give_the_same_weights_bit_for_bit(
    model: Path, recorded: tuple[Path, list[dict[str, float]]], tmp_path: Path
) -> None:
    folder, metrics = recorded
    config = tiny_config(
        model, tmp_path, *HARD, "pipeline.mode=train_only", f"pipeline.replay={folder}", "data.train=null",
        "rewards.functions=[]",
    )  # fmt: skip
    _, sink = run(config)
    assert model_bytes(tmp_path) == model_bytes(folder)
    trained = ("reward/", "group", "response/", "rollouts/", "filter/")  # of all sampled groups, in the recorded run
    assert comparable(sink.metrics, *trained) == comparable(metrics, *trained)
    assert all(line["staleness/max"] == 0 for line in sink.metrics)
    assert "rollout" not in sink.stages and "rewards" not in sink.stages


def test_later_rollouts_replayed_from_the_start_are_ahead_of_the_policy(
    model: Path, recorded: tuple[Path, list[dict[str, float]]], tmp_path: Path
) -> None:
    last = recorded[0] / "rollouts/step_00000003.parquet"
    overrides = ["pipeline.mode=train_only", f"pipeline.replay={last}", "run.steps=1"]
    _, sink = run(tiny_config(model, tmp_path, *HARD, *overrides))
    assert sink.metrics[0]["staleness/max"] == sink.metrics[0]["staleness/mean"] == -2


def test_a_replay_that_does_not_fit_says_what_to_change(
    model: Path, recorded: tuple[Path, list[dict[str, float]]], tmp_path: Path
) -> None:
    folder = recorded[0]
    short = tiny_config(
        model, tmp_path / "short", "pipeline.mode=train_only", f"pipeline.replay={folder}", "run.steps=4"
    )
    with pytest.raises(ValueError, match="the rollouts of 3 steps but run.steps is 4; set run.steps to at most 3"):
        run(short)
    foreign = read_rollouts(folder)[0][1]
    foreign[0].rollouts[0].segments[0].token_ids[0] = 5000
    RolloutLog(tmp_path).write(1, foreign)
    config = tiny_config(
        model, tmp_path / "foreign", "pipeline.mode=train_only", f"pipeline.replay={tmp_path}", "run.steps=1"
    )
    with pytest.raises(ValueError, match="holds token 5000 but the model knows 264 tokens"):
        run(config)


def test_rollout_only_samples_what_training_would_and_builds_no_optimizer(
    model: Path, recorded: tuple[Path, list[dict[str, float]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("an optimizer was built")

    monkeypatch.setattr("grpo_mc.pipeline.run.Policy", refuse)
    monkeypatch.setattr("grpo_mc.pipeline.run.build_reference", refuse)
    result, sink = run(tiny_config(model, tmp_path, *HARD, "pipeline.mode=rollout_only"))
    assert result.model_dir is None and result.steps == 3
    assert not (tmp_path / "checkpoints").exists() and not (tmp_path / "model").exists()
    assert [line["policy/version"] for line in sink.metrics] == [0, 0, 0]
    first, trained = sink.metrics[0], recorded[1][0]
    assert first["reward/mean"] == trained["reward/mean"]
    assert first["filter/kept_groups"] == 4, "nothing is sorted out where nothing is trained on"
    steps = dict(read_rollouts(tmp_path))
    assert [len(groups) for groups in steps.values()] == [4, 4, 4]
    kept = {group.group_id: group for group in dict(read_rollouts(recorded[0]))[1]}
    for group in steps[1]:
        if group.group_id in kept:
            texts = [rollout.text for rollout in kept[group.group_id].rollouts]
            assert [rollout.text for rollout in group.rollouts] == texts


def test_rollout_only_keeps_groups_of_one(model: Path, tmp_path: Path) -> None:
    overrides = ("pipeline.mode=rollout_only", "rollout.group_size=1", "run.steps=1", "algorithm.max_refills=2")
    _, sink = run(tiny_config(model, tmp_path, *overrides))
    assert sink.metrics[0]["filter/rounds"] == 1
    assert [len(group.rollouts) for group in sink.groups[0]] == [1, 1, 1, 1]


def test_rollout_only_refuses_to_resume_instead_of_deleting_rollouts(model: Path, tmp_path: Path) -> None:
    config = tiny_config(model, tmp_path, "pipeline.mode=rollout_only", "run.steps=1")
    run(config)
    with pytest.raises(ValueError, match="rollout_only.*another run.dir and run.seed"):
        run(config, resume=True)
    assert len(read_rollouts(tmp_path)) == 1


def test_train_only_goes_on_where_it_stopped(
    model: Path, recorded: tuple[Path, list[dict[str, float]]], tmp_path: Path
) -> None:
    replay = (*HARD, "pipeline.mode=train_only", f"pipeline.replay={recorded[0]}")
    run(tiny_config(model, tmp_path, *replay, "run.steps=1"))
    run(tiny_config(model, tmp_path, *replay, "run.steps=3"), resume=True)
    assert model_bytes(tmp_path) == model_bytes(recorded[0])
