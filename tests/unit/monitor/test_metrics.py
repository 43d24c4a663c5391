"""MetricsWriter: lines, resume, samples, and the writers outside the run directory."""

from __future__ import annotations

import importlib
import json
import math
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grpo_mc.monitor.external import TensorBoardWriter
from grpo_mc.monitor.metrics import MetricsWriter, pick_samples


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_each_step_is_on_disk_at_once(tmp_path: Path, make_config: Any) -> None:
    writer = MetricsWriter(tmp_path / "run", make_config(), rank=0)
    writer.write(1, {"reward/mean": np.float32(0.5), "n": np.int64(3), "flag": True, "kl": math.nan})
    assert lines(tmp_path / "run" / "metrics.jsonl") == [
        {"step": 1, "reward/mean": 0.5, "n": 3, "flag": 1, "kl": "NaN"}
    ]
    writer.write(2, {})
    assert [r["step"] for r in lines(tmp_path / "run" / "metrics.jsonl")] == [1, 2]
    writer.close()
    writer.close()


def test_a_tensor_of_one_element_is_a_number(tmp_path: Path, make_config: Any) -> None:
    torch = pytest.importorskip("torch")
    with MetricsWriter(tmp_path, make_config(), rank=0) as writer:
        writer.write(1, {"loss": torch.tensor(0.25)})
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": 0.25}]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("value", ["high", None, [1.0, 2.0]])
def test_a_metric_that_is_no_number_is_refused_by_name(tmp_path: Path, make_config: Any, value: Any, rank: int) -> None:
    with MetricsWriter(tmp_path, make_config(), rank=rank) as writer:
        with pytest.raises(ValueError, match="'reward/mean' is .*a metric is one number"):
            writer.write(1, {"reward/mean": value})


def test_other_ranks_write_nothing(tmp_path: Path, make_config: Any, make_group: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("RANK", "3")
    with MetricsWriter(tmp_path / "run", make_config()) as writer:
        writer.write(1, {"reward/mean": 1.0})
        writer.write_evaluation(1, {"accuracy": 1.0})
        writer.write_samples(1, [make_group(0, [1.0])])
        writer.resume(0)
    assert not (tmp_path / "run").exists()


def test_resume_removes_later_steps_everywhere(run_dir: Path, make_config: Any, make_group: Any) -> None:
    """H24's relative: what was measured after the checkpoint is measured again, and stands there once."""
    with (run_dir / "metrics.jsonl").open("a") as handle:
        handle.write('{"step": 41, "reward/me')
    with MetricsWriter(run_dir, make_config(resume=True), rank=0) as writer:
        writer.write(41, {"reward/mean": 9.0})
        writer.resume(20)
        writer.write(21, {"reward/mean": 0.7})
        writer.write_samples(21, [make_group(21, [1.0])])
    assert [r["step"] for r in lines(run_dir / "metrics.jsonl")] == list(range(1, 22))
    assert [r["step"] for r in lines(run_dir / "evaluations.jsonl")] == [0, 20]
    assert [r["step"] for r in lines(run_dir / "samples.jsonl")][-3:] == [20, 20, 21]


def test_resume_at_step_0_keeps_only_the_first_evaluation(run_dir: Path, make_config: Any) -> None:
    with MetricsWriter(run_dir, make_config(resume=True), rank=0) as writer:
        writer.resume(0)
    assert (run_dir / "metrics.jsonl").read_text() == ""
    assert [r["step"] for r in lines(run_dir / "evaluations.jsonl")] == [0]


def test_two_runs_do_not_mix_in_one_directory(run_dir: Path, make_config: Any) -> None:
    with pytest.raises(ValueError, match=r"already holds 40 steps of a run.*another run\.dir.*--resume"):
        MetricsWriter(run_dir, make_config(), rank=0)


@pytest.mark.parametrize(
    ("name", "held"),
    [("checkpoints/step_7", "1 checkpoints"), ("rollouts/step_00000001.parquet", "1 rollout files")],
)
def test_what_a_run_left_without_metrics_is_not_mixed_with_another(
    tmp_path: Path, make_config: Any, name: str, held: str
) -> None:
    (tmp_path / name).mkdir(parents=True)
    with pytest.raises(ValueError, match=f"already holds {held} of a run.*another run\\.dir"):
        MetricsWriter(tmp_path, make_config(), rank=0)


def test_a_run_that_died_before_its_first_step_can_start_again(tmp_path: Path, make_config: Any) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "config.yaml").write_text("run: {}\n")
    MetricsWriter(tmp_path, make_config(), rank=0).close()


def test_samples_show_best_and_worst_with_reasons(tmp_path: Path, make_config: Any, make_group: Any) -> None:
    with MetricsWriter(tmp_path, make_config(samples_per_step=3), rank=0) as writer:
        writer.write_samples(1, [make_group(0, [0.5, None, 1.0, 0.0]), make_group(1, [0.0, 1.0])])
    samples = lines(tmp_path / "samples.jsonl")
    assert [(s["group_id"], s["sample_index"], s["reward"]) for s in samples] == [(0, 2, 1.0), (0, 3, 0.0), (1, 1, 1.0)]
    assert samples[0]["prompt"] == "1 + 1 = <b>?</b>"
    assert samples[0]["verdicts"] == [{"name": "exact", "status": "scored", "score": 1.0, "reason": "equal"}]
    assert samples[0]["finish_reason"] == "finished"


def test_an_unscored_group_still_gives_a_sample(make_group: Any) -> None:
    """H03: an unscored rollout has reward null, never 0."""
    picked = pick_samples([make_group(0, [None, None])], 2)
    assert [(r.sample_index, r.reward) for r in picked] == [(0, None), (1, None)]
    assert pick_samples([], 2) == []
    assert len(pick_samples([make_group(0, [1.0])], 2)) == 1


def test_no_samples_when_switched_off(tmp_path: Path, make_config: Any, make_group: Any) -> None:
    with MetricsWriter(tmp_path, make_config(samples_per_step=0), rank=0) as writer:
        writer.write_samples(1, [make_group(0, [1.0])])
    assert not (tmp_path / "samples.jsonl").exists()


@pytest.mark.parametrize(
    ("change", "module", "message"),
    [
        ({"tensorboard": True}, "tensorboard", r"grpo_mc\[tensorboard\].*monitor\.tensorboard=false"),
        ({"wandb": "project"}, "wandb", r"grpo_mc\[wandb\].*monitor\.wandb=null"),
    ],
)
def test_a_writer_that_is_not_installed_is_an_error(
    tmp_path: Path, make_config: Any, monkeypatch: pytest.MonkeyPatch, change: Any, module: str, message: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=message):
        MetricsWriter(tmp_path / "run", make_config(**change), rank=0)


def test_tensorboard_gets_every_scalar_and_hides_later_steps_on_resume(
    tmp_path: Path, make_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[dict[str, Any]] = []
    scalars: list[tuple[str, float, int]] = []

    class SummaryWriter:
        def __init__(self, **options: Any) -> None:
            opened.append(options)

        def add_scalar(self, name: str, value: float, global_step: int) -> None:
            scalars.append((name, value, global_step))

        def flush(self) -> None: ...

        def close(self) -> None: ...

    fake = types.SimpleNamespace(SummaryWriter=SummaryWriter)
    real_import = importlib.import_module
    monkeypatch.setattr(
        importlib,
        "import_module",
        lambda name: {"tensorboard": fake, "torch.utils.tensorboard": fake}.get(name) or real_import(name),
    )
    with MetricsWriter(tmp_path, make_config(tensorboard=True), rank=0) as writer:
        writer.write(1, {"reward/mean": 0.5})
        writer.write_evaluation(1, {"accuracy": 0.25, "note": "text"})
        writer.resume(0)
        writer.write(1, {"reward/mean": 0.75})
    assert scalars == [("reward/mean", 0.5, 1), ("evaluation/accuracy", 0.25, 1), ("reward/mean", 0.75, 1)]
    assert [o["purge_step"] for o in opened] == [None, 1]
    assert TensorBoardWriter.__doc__


def test_wandb_continues_the_same_run_on_resume(
    tmp_path: Path, make_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[dict[str, Any]] = []
    logged: list[dict[str, Any]] = []
    run = types.SimpleNamespace(log=logged.append, finish=lambda: None, define_metric=lambda *args, **options: None)
    fake = types.ModuleType("wandb")
    fake.util = types.SimpleNamespace(generate_id=lambda: "abc123")  # type: ignore[attr-defined]
    fake.init = lambda **options: started.append(options) or run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with MetricsWriter(tmp_path, make_config(wandb="sums"), rank=0) as writer:
        writer.write(1, {"reward/mean": 0.5})
    fake.util = types.SimpleNamespace(generate_id=lambda: "other")  # type: ignore[attr-defined]
    MetricsWriter(tmp_path, make_config(wandb="sums", resume=True), rank=0).close()
    assert [(s["project"], s["id"]) for s in started] == [("sums", "abc123"), ("sums", "abc123")]
    assert logged == [{"train_step": 1, "reward/mean": 0.5}]
