"""Arguments that several commands share: config and overrides, reward functions."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from grpo_mc.cli.inputs import parse_rewards, refuse_missing, split_config_and_overrides


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["a.yaml"], (Path("a.yaml"), [])),
        (["optimizer.lr=1", "a.yaml", "run.steps=2"], (Path("a.yaml"), ["optimizer.lr=1", "run.steps=2"])),
    ],
)
def test_config_and_overrides_in_any_order(arguments: list[str], expected: tuple[Path, list[str]]) -> None:
    assert split_config_and_overrides(arguments, needs_config=True) == expected


def test_a_file_name_with_an_equals_sign_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "lr=1.yaml"
    path.write_text("")
    assert split_config_and_overrides([str(path), "run.steps=2"], needs_config=True) == (path, ["run.steps=2"])


def test_without_a_config_only_overrides(tmp_path: Path) -> None:
    assert split_config_and_overrides(["run.steps=2"], needs_config=False) == (None, ["run.steps=2"])
    with pytest.raises(ValueError, match="no config file given"):
        split_config_and_overrides(["run.steps=2"], needs_config=True)


def test_rewards_by_type_and_by_mapping() -> None:
    texts = ["math", "{type: numeric, tolerance: 0.01, name: close}", '{type: regex, pattern: "[a-z]+"}']
    section = parse_rewards(texts)
    assert [(f.type, f.name) for f in section.functions] == [
        ("math", "math"),
        ("numeric", "close"),
        ("regex", "regex"),
    ]
    assert section.functions[1].tolerance == 0.01  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("text", "message"),
    [("maths", "did you mean 'math'"), ("{type: numeric, tolerence: 1}", "did you mean 'tolerance'"),
     ("{type: numeric, tolerance: high}", "tolerance is 'high'"), ("{type: numeric", "line 1")],
)  # fmt: skip
def test_a_mistake_in_a_reward_is_named(text: str, message: str) -> None:
    """H25 on the command line."""
    with pytest.raises(ValueError, match=message):
        parse_rewards([text])


def test_an_override_longer_than_any_file_name_is_an_override() -> None:
    override = "run.seed=" + "1" * 5000
    assert split_config_and_overrides(["a.yaml", override], needs_config=True) == (Path("a.yaml"), [override])


def test_a_missing_path_names_its_newest_neighbour(tmp_path: Path) -> None:
    for name in ("run-1", "run-2", "other"):
        (tmp_path / name).mkdir()
    os.utime(tmp_path / "run-1", (1, 1))
    with pytest.raises(FileNotFoundError, match=r"eval: there is no .*/run; there is .*/run-2; give a thing"):
        refuse_missing("eval", tmp_path / "run", "a thing")
    with pytest.raises(FileNotFoundError, match=r"there is no .*/none; give a thing"):
        refuse_missing("eval", tmp_path / "none", "a thing")
    refuse_missing("eval", tmp_path / "run-1", "a thing")
