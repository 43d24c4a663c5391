"""What the commands do with their arguments; the heavy parts behind them are stand-ins where a test names them."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_mc.cli import calls
from grpo_mc.cli.program import main
from helpers.tiny_models import build_tiny_model

CONFIG = """\
model: {path: tiny}
data:
  train: {kind: jsonl, path: train.jsonl, chat: false}
  prompts_per_step: 2
rollout: {group_size: 4, max_new_tokens: 8}
rewards:
  functions: [{type: exact}]
parallel: {max_tokens_per_micro_batch: 128}
run: {dir: runs/demo, steps: 3}
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a configuration and data; the working directory."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "c.yaml").write_text(CONFIG)
    (tmp_path / "train.jsonl").write_text('{"prompt": "1 + 1 =", "ground_truth": "2"}\n')
    return tmp_path


def fake_train(steps: int = 3) -> Any:
    """A training loop that only reports to its sink."""

    def train(config: Any, *, resume_dir: Path | None, sink: Any) -> None:
        run_dir = Path(config.run.dir)
        (run_dir / "config.yaml").write_text(CONFIG)
        first = 1 if resume_dir is None else 2
        if resume_dir is None:
            sink.evaluation(0, {"accuracy": 0.25, "stderr": 0.1, "n": 20})
        else:
            sink.resume(1)
        for step in range(first, steps + 1):
            sink.step(step, {"reward/mean": step / 10})
        sink.evaluation(steps, {"accuracy": 0.5, "stderr": 0.1, "n": 20})

    return train


def test_train_monitors_and_writes_the_report(project: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(calls, "train", fake_train())
    assert main(["train", "c.yaml", "run.steps=3"]) == 0
    out = capsys.readouterr().out
    assert "step 3/3  reward 0.3" in out
    for line in (
        "evaluation at step 0: accuracy 0.25 +- 0.1 (n = 20)",
        "evaluation at step 3: accuracy 0.5 +- 0.1 (n = 20)",
    ):
        assert out.count(line) == 1, "each result once"
    assert out.count("accuracy") == 2
    assert out.endswith(f"report: {project}/runs/demo/report.html\n")
    assert (project / "runs/demo/report.html").exists()


def test_a_quiet_run_prints_its_evaluations_at_the_end(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(calls, "train", fake_train())
    assert main(["train", "c.yaml", "monitor.progress=false"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "evaluation at step 0: accuracy 0.25 +- 0.1 (n = 20)",
        "evaluation at step 3: accuracy 0.5 +- 0.1 (n = 20)",
        f"report: {project}/runs/demo/report.html",
    ]


@pytest.mark.parametrize(
    ("made", "text"),
    [
        ([], "interrupted before the first step: nothing was saved, start again with the same command"),
        (["metrics.jsonl"], "interrupted, and no step is saved; start again with another run.dir, or delete {run_dir}"),
        (
            ["metrics.jsonl", "checkpoints/step_1/x"],
            "interrupted; go on from the last saved step with `grpo-mc train --resume {run_dir}`",
        ),
    ],
)
def test_ctrl_c_at_once_says_what_is_left(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, made: list[str], text: str
) -> None:
    """A stop during the set-up said `grpo-mc: interrupted` and left a folder without config.yaml."""

    def train(config: Any, *, resume_dir: Path | None, sink: Any) -> None:
        for name in made:
            (Path(config.run.dir) / name).parent.mkdir(parents=True, exist_ok=True)
            (Path(config.run.dir) / name).write_text('{"step": 1}\n')
        raise KeyboardInterrupt

    monkeypatch.setattr(calls, "train", train)
    assert main(["train", "c.yaml"]) == 130
    assert capsys.readouterr().err == f"grpo-mc: {text.format(run_dir=project / 'runs/demo')}\n"
    if not made:
        monkeypatch.setattr(calls, "train", fake_train())
        assert main(["train", "c.yaml"]) == 0, "the same command starts again"


def test_train_does_not_mix_two_runs(project: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(calls, "train", fake_train())
    assert main(["train", "c.yaml"]) == 0
    capsys.readouterr()
    assert main(["train", "c.yaml"]) == 2
    assert "already holds 3 steps of a run" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["c.yaml"], ["--resume", "runs/demo"]])
def test_a_second_process_in_one_run_directory_stops_at_once(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, arguments: list[str]
) -> None:
    from grpo_mc.monitor import RunMonitor

    monkeypatch.setattr(calls, "train", lambda *args, **options: pytest.fail("training started"))
    config = calls.load_config(project / "c.yaml", [])
    with RunMonitor(config.run.dir, config):
        (project / "runs/demo/config.yaml").write_text(CONFIG)
        assert main(["train", *arguments]) == 2
        error = capsys.readouterr().err
    assert error.startswith(f"grpo-mc: error: train: run.dir {project}/runs/demo is in use by process {os.getpid()} on")
    assert "another run.dir" in error and error.count("\n") == 1
    assert sorted(p.name for p in (project / "runs/demo").iterdir()) == ["config.yaml", "run.lock"]


def test_resume_takes_the_runs_own_config_and_the_overrides(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(calls, "train", fake_train())
    assert main(["train", "c.yaml"]) == 0
    (project / "runs/demo").rename(project / "moved")
    (project / "c.yaml").unlink()
    (project / "moved/config.yaml").write_text(CONFIG)
    seen: list[Any] = []

    def train(config: Any, *, resume_dir: Path | None, sink: Any) -> None:
        seen.append((config, resume_dir))
        fake_train(5)(config, resume_dir=resume_dir, sink=sink)

    monkeypatch.setattr(calls, "train", train)
    assert main(["train", "--resume", "moved", "run.steps=5"]) == 0
    config, resume_dir = seen[0]
    assert (config.run.resume, config.run.steps, config.run.dir) == (True, 5, str(project / "moved"))
    assert resume_dir == Path("moved")
    metrics = [json.loads(line)["step"] for line in (project / "moved/metrics.jsonl").read_text().splitlines()]
    assert metrics == [1, 2, 3, 4, 5]


def test_what_training_needs_is_checked_before_it_starts(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(calls, "train", lambda *args, **options: pytest.fail("training started"))
    assert main(["train", "c.yaml", "rewards.functions=[]"]) == 2
    assert "rewards.functions is empty" in capsys.readouterr().err
    assert not (project / "runs").exists()


def test_a_failure_in_training_leaves_the_metrics_and_no_report(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def train(config: Any, *, resume_dir: Path | None, sink: Any) -> None:
        sink.step(1, {"reward/mean": 0.5})
        raise ValueError("train: the reward function 'mine' is gone; mend it")

    monkeypatch.setattr(calls, "train", train)
    assert main(["train", "c.yaml"]) == 2
    assert "grpo-mc: error: train: the reward function 'mine' is gone" in capsys.readouterr().err
    assert sorted(p.name for p in (project / "runs/demo").iterdir()) == ["metrics.jsonl", "run.lock"]


def test_the_number_of_processes_is_checked_but_not_written_down(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """config.yaml without dp also holds for a resume on another number of processes."""
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setattr(calls, "train", lambda *args, **options: pytest.fail("training started"))
    assert main(["train", "c.yaml", "parallel.tp=2"]) == 2
    assert "world size 3 is not a multiple of tp * pp * cp" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert calls.load_config(project / "c.yaml", ["parallel.tp=2"]).parallel.dp is None
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert calls.with_layout(calls.load_config(project / "c.yaml", [])).parallel.dp == 2


def test_dry_run_explains_and_stops(project: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    build_tiny_model(project / "tiny")
    monkeypatch.setattr(calls, "train", lambda *args, **options: pytest.fail("training started"))
    assert main(["train", "c.yaml", "algorithm.beta=0.04", "--dry-run"]) == 0
    out = capsys.readouterr().out
    parts = [line[3:] for line in out.splitlines() if line.startswith("== ")]
    memory = "memory on the fullest rank (estimate)"
    assert parts == ["configuration", "objective", "mesh", memory, "prompts", "one scored reward"]
    for text in ("beta: 0.04", "A_i = ", "processes 1 = tp 1 x pp 1 x cp 1 x dp 1", "2 groups x 4 = 8 rollouts",
                 "training: 1 of 1 records", "M parameters", "reference          0.00", "prompt   '1 + 1 ='",
                 "response '2'", "reward 1"):  # fmt: skip
        assert text in out, text
    assert not (project / "runs").exists()


def test_dry_run_refuses_a_layout_that_does_not_fit_the_model(project: Path, capsys: Any) -> None:
    build_tiny_model(project / "tiny")
    assert main(["train", "c.yaml", "parallel.tp=3", "--dry-run"]) == 2
    assert "num_heads is 4, not a multiple; tp may be 1, 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.max_new_tokens=512"], "rollout.max_new_tokens is 512 but the model has 512 positions"),
        (
            ["rollout.max_new_tokens=509"],
            "no prompt is left: 1 records read.*as longer than 3 tokens .the model's 512 positions",
        ),
        (["evaluation.max_new_tokens=509"], "1 of 1 held-out prompts are longer than the 3 tokens.*512 positions"),
    ],
)
def test_dry_run_refuses_prompts_that_leave_no_room_for_a_response(
    project: Path, capsys: Any, overrides: list[str], message: str
) -> None:
    build_tiny_model(project / "tiny")
    held_out = "evaluation.source={kind: jsonl, path: train.jsonl, chat: false}"
    sizes = ["rollout.group_size=2", "data.max_prompt_tokens=8", "parallel.max_tokens_per_micro_batch=4096"]
    assert main(["train", "c.yaml", held_out, *sizes, *overrides, "--dry-run"]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_eval_of_a_run_measures_its_trained_model(project: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    run_dir = project / "run"
    (run_dir / calls.EXPORT_DIR).mkdir(parents=True)
    (run_dir / "config.yaml").write_text(CONFIG.replace("train.jsonl", str(project / "train.jsonl")))
    seen: list[Any] = []
    figures = {"accuracy": 0.5, "accuracy_error": 0.0497519, "stderr": 0.0502519, "reward_mean": 0.25,
               "reward_stderr": 0.0123456, "n": 100, "pass@4": 0.75}  # fmt: skip

    def evaluate(config: Any, *, on_progress: Any) -> dict[str, Any]:
        seen.append(config)
        on_progress(100, 100)
        return figures

    monkeypatch.setattr(calls, "evaluate", evaluate)
    source = "evaluation.source={kind: jsonl, path: train.jsonl, chat: false}"
    assert main(["eval", str(run_dir), source]) == 0
    assert seen[0].model.path == str(run_dir / calls.EXPORT_DIR)
    assert capsys.readouterr().out.splitlines() == [
        "accuracy 0.5 +- 0.0498 (n = 100)",
        "  reward_mean      0.25 +- 0.0123",
        "  pass@4           0.75",
    ]
    assert main(["eval", "--json", str(run_dir), source]) == 0
    assert json.loads(capsys.readouterr().out) == figures


def test_eval_says_what_is_missing(project: Path, capsys: Any) -> None:
    assert main(["eval", "c.yaml"]) == 2
    assert "sets no evaluation.source" in capsys.readouterr().err
    (project / "run").mkdir()
    assert main(["eval", "run"]) == 2
    assert "run holds no config.yaml" in capsys.readouterr().err
    (project / "run/config.yaml").write_text((project / "c.yaml").read_text())
    assert main(["eval", "run"]) == 2
    assert "run holds no model/" in capsys.readouterr().err


def test_generate_passes_every_option_on(project: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    seen: dict[str, Any] = {}
    rollout = SimpleNamespace(
        prompt=SimpleNamespace(text="a\nb"), text=" c", sample_index=1, group_id=0, response_length=2,
        finish_reason="finished",
    )  # fmt: skip

    def generate(model: str, prompts: list[str], **options: Any) -> list[Any]:
        seen.update(model=model, prompts=prompts, **options)
        return [rollout, rollout] if len(prompts) > 1 else [rollout]

    monkeypatch.setattr(calls, "generate", generate)
    (project / "p.txt").write_text("from a file\n\n")
    arguments = ["generate", "m", "--prompt", r"a\nb", "--prompt-file", "p.txt", "--chat", "--system", "s",
                 "--num-samples", "2", "--max-new-tokens", "9", "--temperature", "0.5", "--top-k", "4", "--top-p",
                 "0.9", "--stop", "X", "--seed", "7", "--dtype", "bf16"]  # fmt: skip
    assert main(arguments) == 0
    assert seen == {
        "model": "m", "prompts": ["a\nb", "from a file"], "chat": True, "system_prompt": "s", "num_samples": 2,
        "max_new_tokens": 9, "temperature": 0.5, "top_k": 4, "top_p": 0.9, "stop": ["X"], "seed": 7, "dtype": "bf16",
    }  # fmt: skip
    assert capsys.readouterr().out == "=== prompt 1, sample 2 (finished)\n c\n" * 2
    assert main([*arguments, "--json"]) == 0
    assert [json.loads(line)["response"] for line in capsys.readouterr().out.splitlines()] == [" c", " c"]
    assert main(["generate", "m", "--prompt", "a"]) == 0
    assert capsys.readouterr().out == " c\n", "one response is the whole output"


def test_convert_and_check_pass_their_arguments_on(project: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(calls, "import_model", lambda s, d, dtype: seen.append(("import", s, d, dtype)) or d)
    monkeypatch.setattr(calls, "export_model", lambda s, d, dtype: seen.append(("export", s, d, dtype)) or d)
    monkeypatch.setattr(calls, "check_parity", lambda **options: seen.append(options) or 1)
    assert main(["convert", "import", "package:x", "out"]) == 0
    assert main(["convert", "export", "runs/a", "out", "--dtype", "bf16"]) == 0
    assert main(["check", "parity", "--layout", "tp2"]) == 1
    assert seen == [
        ("import", "package:x", Path("out"), "fp32"),
        ("export", Path("runs/a"), Path("out"), "bf16"),
        {"layouts": ["tp2"], "tolerance": 1e-5, "timeout_s": 300.0, "model": None},
    ]
    assert capsys.readouterr().out == "written: out\nwritten: out\n"


def test_bench_lists_and_refuses_unknown_operators(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(calls, "list_benchmarks", lambda: ["policy_loss", "token_logprobs"])
    expected = {"as_json": True, "compare": None, "device": "cpu"}
    monkeypatch.setattr(calls, "run_benchmark", lambda name, **options: 0 if options == expected else 9)
    assert main(["bench", "--list"]) == 0
    assert capsys.readouterr().out == "policy_loss\ntoken_logprobs\n"
    assert main(["bench", "policy_loss", "--json"]) == 0
    assert main(["bench", "softmax"]) == 2
    assert "no operator 'softmax'; operators are policy_loss, token_logprobs" in capsys.readouterr().err


def test_rewards_score_end_to_end(project: Path, capsys: Any) -> None:
    (project / "r.jsonl").write_text(
        '{"prompt": "p", "response": "so 2", "ground_truth": "2"}\n'
        '{"prompt": "p", "response": "5", "ground_truth": "2"}\n'
    )
    assert main(["rewards", "score", "r.jsonl", "--reward", "numeric"]) == 0
    out = capsys.readouterr().out
    assert "2 responses in 1 group, 2 scored" in out
    assert "numeric          mean 0.5" in out
    assert main(["rewards", "score", "r.jsonl", "--config", "c.yaml", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["reward"] for row in rows] == [0.0, 0.0]
    assert rows[0]["verdicts"][0]["status"] == "scored"


def test_rewards_list_and_explain_agree_with_the_configuration(capsys: Any) -> None:
    from grpo_mc.cli.reward_text import option_lines

    assert main(["rewards", "list"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert {"exact", "numeric", "math", "reasoning_gym", "function"} <= set(names)
    for name in names:
        assert any(line.startswith("  weight  (number; default 1.0)") for line in option_lines(name))
    assert main(["rewards", "explain", "exact"]) == 0
    assert "  strip  (true | false; default true)" in capsys.readouterr().out
