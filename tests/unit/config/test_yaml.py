"""Strict YAML: plain text means what YAML 1.2 says, duplicates and traps are refused with their line."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_mc.config import ConfigError, load_config, load_config_text
from grpo_mc.config.strict_yaml import parse_yaml, scalar

Refusal = Callable[..., str]


@pytest.mark.parametrize("depth", [60, 100_000])
def test_deeply_nested_yaml_is_one_clear_error(depth: int) -> None:
    """A RecursionError from the YAML library, or later from what copies the value."""
    with pytest.raises(ConfigError, match="f.yaml.*nested deeper than 50 levels"):
        parse_yaml("a: " + "[" * depth + "]" * depth, "f.yaml", Path())


@pytest.mark.parametrize("text", ["1" * 5000, "0x" + "f" * 5000, "0." + "1" * 5000])
def test_a_number_of_thousands_of_digits_is_refused_in_a_short_message(text: str) -> None:
    with pytest.raises(ConfigError, match="run.seed=.*too long") as error:
        load_config_text("model: {path: none}\nrun: {dir: none, steps: 0}\n", [f"run.seed={text}"])
    assert len(str(error.value)) < 400


@pytest.mark.parametrize("override", ["x" * 5000, "run.seed=" + "a" * 5000, "run." + "b" * 5000 + "=1", "run.\u00b2=1"])
def test_long_overrides_are_not_echoed_whole(override: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config_text("model: {path: none}\nrun: {dir: none, steps: 0}\n", [override])
    assert len(str(error.value)) < 600


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("5E3", 5000.0),
        ("1.0e-6", 1e-6),
        (".5", 0.5),
        ("-2.", -2.0),
        ("12", 12),
        ("010", 10),
        ("0x1F", 31),
        ("0o17", 15),
        ("true", True),
        ("False", False),
        ("no", "no"),
        ("on", "on"),
        ("yes", "yes"),
        ("1:30", "1:30"),
        ("2026-01-01", "2026-01-01"),
        ("1_000", "1_000"),
        ("~", None),
        ("null", None),
        ("e5", "e5"),
        (".", "."),
        ("1e", "1e"),
    ],
)
def test_plain_text_is_read_as_yaml_1_2(text: str, value: Any) -> None:
    """1e-6 is the trap: YAML 1.1 readers take it for text."""
    got = scalar(text)
    assert got == value and type(got) is type(value)


def test_special_floats() -> None:
    assert scalar(".inf") == math.inf and scalar("-.inf") == -math.inf
    nan = scalar(".nan")
    assert isinstance(nan, float) and math.isnan(nan)


def test_small_learning_rate_is_a_number(minimal: str) -> None:
    config = load_config_text(minimal + "optimizer: {lr: 1e-6}\n")
    assert config.optimizer.lr == 1e-6
    assert load_config_text(minimal, ["optimizer.lr=1e-6"]).optimizer.lr == 1e-6


def test_quoted_number_is_text(refusal: Refusal, minimal: str) -> None:
    assert refusal(minimal + 'optimizer: {lr: "1e-6"}\n') == (
        "a.yaml, line 10: optimizer.lr is '1e-6' (text); it needs a number"
    )


def test_duplicate_key_is_refused_with_both_lines(refusal: Refusal, minimal: str) -> None:
    message = refusal(minimal + "optimizer:\n  lr: 1e-6\n  eps: 1e-8\n  lr: 1e-5\n")
    assert message == "a.yaml, line 13: key 'lr' in optimizer is given twice, first in line 11; remove one"


def test_duplicate_section_is_refused(refusal: Refusal, minimal: str) -> None:
    assert "line 10: key 'run' in the top level is given twice, first in line 4" in refusal(minimal + "run: {}\n")


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("run:\n  dir: x\n   steps: 3\n", "line 3, column 9"),
        ("run:\n\tdir: x\n", "line 2, column 1"),
        ("run: [1, 2\n", "line 2, column 1"),
        ("run: 'open\n", "line 2, column 1"),
        ("a: 1\n---\nb: 2\n", "line 2, column 1"),
        ("a: *nowhere\n", "line 1, column 4"),
    ],
)
def test_bad_yaml_names_line_and_column(refusal: Refusal, text: str, place: str) -> None:
    """H25: bad YAML gives line and column."""
    assert refusal(text).startswith(f"a.yaml, {place}: not valid YAML: ")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("- 1\n", "line 1: a configuration is sections with keys; got a list"),
        ("just text\n", "line 1: a configuration is sections with keys; got a single value"),
        ("run: !!python/object:os.system {}\n", "line 1: tag 'tag:yaml.org,2002:python/object:os.system'"),
        ("a: &x {b: 1}\nc:\n  <<: *x\n", "line 3: merge keys (<<) are not supported"),
        ("? [a, b]\n: 1\n", "line 1: a key in the top level is a list"),
        ("a: &x [*x]\n", "line 1: this alias contains itself"),
    ],
)
def test_refused_yaml(refusal: Refusal, text: str, part: str) -> None:
    assert part in refusal(text)


def test_aliases_share_a_source(minimal: str) -> None:
    text = minimal.replace("train: {", "train: &sums {") + "evaluation:\n  source: *sums\n"
    with pytest.raises(ConfigError, match="share problems"):  # the same seeds: read, then refused for what it says
        load_config_text(text)


def test_expanding_aliases_are_bounded(refusal: Refusal) -> None:
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    assert "aliases expand to more than 20000 values" in refusal("\n".join(lines))


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_survive_writing(value: float) -> None:
    document = parse_yaml(f"a: {value!r}\n", "a.yaml", Path())
    assert document.data == {"a": value} and isinstance(document.data["a"], float)


@given(st.text(max_size=200))
def test_any_text_is_read_or_refused_by_name(text: str) -> None:
    """No text makes the reader fail with anything but a ConfigError."""
    try:
        load_config_text(text)
    except ConfigError:
        pass


def test_missing_folder_and_binary_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load_config(tmp_path / "no.yaml")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load_config(tmp_path)
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_config(tmp_path / "b.yaml")
