"""Messages that tell people what to install name extras and packages that pyproject.toml and constraints.txt have."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_mc.megatron.checkpoint_cache import PACKAGED_MODELS
from grpo_mc.monitor.external import TensorBoardWriter, WandbWriter
from helpers.processes import REPOSITORY

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
CONSTRAINTS = (REPOSITORY / "constraints.txt").read_text().splitlines()
NOT_NAMES = ("{", ".", "-")
"""How the words after `pip install` begin that are no package: a value of the message, the checkout, an option."""
VALUES = {
    "cli/doctor_checks.py": {"{name}{allowed}", "{' '.join(missing)}"},  # both from pyproject.toml: test_doctor.py
    "monitor/external.py": {"grpo_mc[{package}]"},  # the two writers below
    "megatron/checkpoint_cache.py": {"{model.distribution}=={model.version}"},  # the packaged models below
    "data/cache.py": {"{name}"},  # the user's package:NAME
}
"""File -> what its messages fill in; whoever adds one checks its values too."""


def hints() -> Iterator[tuple[str, list[str]]]:
    """(place, words after `pip install`) of every string of the package; f-strings as they are written."""
    for path in sorted((REPOSITORY / "grpo_mc").rglob("*.py")):
        tree = ast.parse(path.read_text())
        inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in ast.walk(tree):
            text = ""
            if isinstance(node, ast.JoinedStr):
                text = "".join(
                    "{" + ast.unparse(part.value) + "}" if isinstance(part, ast.FormattedValue) else str(part.value)
                    for part in node.values
                    if isinstance(part, ast.FormattedValue | ast.Constant)
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
                text = node.value
            for found in re.findall(r"pip install ((?:\{[^}]*\}|[^`(;{])+)", text):
                place = f"{path.relative_to(REPOSITORY / 'grpo_mc')}:{node.lineno}"
                yield place, re.findall(r"(?:\{[^}]*\}|[^\s'{])+", found)


def test_hints_name_what_can_be_installed() -> None:
    found, problems = list(hints()), []
    known = {re.split(r"[\[<>=]", requirement)[0] for requirement in PROJECT["dependencies"]}
    known |= {line.split("==")[0] for line in CONSTRAINTS if "==" in line}
    for place, words in found:
        for word in words:
            extra = re.fullmatch(r"grpo_mc\[(\w+)\]", word)
            is_value = word in VALUES.get(place.split(":")[0], ())
            is_known = extra[1] in PROJECT["optional-dependencies"] if extra else word in known
            if not (is_value or is_known or (word.startswith(NOT_NAMES) and "{" not in word)):
                problems.append(
                    f"grpo_mc/{place} tells to install {word}, which neither pyproject.toml nor constraints.txt has"
                )
    assert len(found) >= 7
    assert not problems, "\n".join(problems)


def test_optional_writers_name_an_extra_that_brings_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("tensorboard", "wandb"):
        monkeypatch.setitem(sys.modules, name, None)  # import fails, installed or not
        with pytest.raises(ValueError, match="is not installed") as error:
            TensorBoardWriter(tmp_path) if name == "tensorboard" else WandbWriter(tmp_path, project="p", name=None)
        (extra,) = re.findall(r"grpo_mc\[(\w+)\]", str(error.value))
        assert [re.split(r"[<>=]", one)[0] for one in PROJECT["optional-dependencies"][extra]] == [name]


def test_packaged_models_are_pinned() -> None:
    for model in PACKAGED_MODELS.values():
        assert f"{model.distribution}=={model.version}" in CONSTRAINTS
