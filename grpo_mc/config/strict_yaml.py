"""YAML read strictly, with the line of every key.

Plain text means what it means in YAML 1.2: only true and false are booleans (`no` and `on` are text), 1e-6 is a number
(YAML 1.1 reads text), 1:30 and 2026-01-01 are text, 010 is ten. Refused: duplicate keys, keys that are not text, merge
keys, tags, more than one document.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from grpo_mc.config.base import ConfigError, shorten

KeyPath = tuple[str | int, ...]

_MAX_DEPTH = 50  # of lists and sections inside one another; the configuration itself has 5
_MAX_DIGITS = 400  # of a number: more than any float has
_MAX_NODES = 20_000  # aliases of aliases can make a small file expand without end
_INT = re.compile(r"[-+]?[0-9]+")
_BASED_INT = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_SPECIAL_FLOAT = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


@dataclass(frozen=True)
class Mark:
    """Where a key was written."""

    place: str
    """For messages, e.g. "configs/a.yaml, line 12" or "command line, optimizer.lr=x"."""
    folder: Path
    """Relative paths in its value are taken from here."""


@dataclass(frozen=True)
class Document:
    """What a file says, and where it says it."""

    data: dict[str, Any]
    marks: dict[KeyPath, Mark]

    def mark(self, path: KeyPath) -> Mark | None:
        """The mark of that key, or of the nearest one above it."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.marks:
                return self.marks[path[:length]]
        return None


def scalar(text: str) -> str | int | float | bool | None:
    """The value of plain (unquoted) YAML 1.2 text.

    Raises:
        ValueError: a number of more digits than any setting has.
    """
    if text in ("", "~", "null", "Null", "NULL"):
        return None
    if text in ("true", "True", "TRUE", "false", "False", "FALSE"):
        return text.lower() == "true"
    if len(text) > _MAX_DIGITS and any(kind.fullmatch(text) for kind in (_INT, _BASED_INT, _FLOAT)):
        raise ValueError(f"the number {shorten(text)} is too long; write one of at most {_MAX_DIGITS} characters")
    if _INT.fullmatch(text):
        return int(text)
    if _BASED_INT.fullmatch(text):
        return int(text, 0)
    if _FLOAT.fullmatch(text):
        return float(text)
    if _SPECIAL_FLOAT.fullmatch(text):
        return float(text.lower().replace(".", ""))
    return text


def parse_yaml(text: str, name: str, folder: Path) -> Document:
    """Reads a configuration file's text.

    Args:
        text: the file's text.
        name: the file's name, for messages.
        folder: relative paths are taken from here.

    Raises:
        ConfigError: not YAML (with line and column), or refused (with line).
    """
    node = _compose(text, name)
    if node is None:
        return Document({}, {})
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{_place(name, node)}: a configuration is sections with keys; got {_kind(node)}")
    builder = _Builder(name, folder)
    return Document(builder.build(node, ()), builder.marks)


def parse_value(text: str, name: str) -> Any:
    """Reads one value, as it stands after `section.key=` on the command line."""
    node = _compose(text, name)
    return None if node is None else _Builder(name, Path()).build(node, ())


def _compose(text: str, name: str) -> yaml.Node | None:
    # BaseLoader resolves nothing: every plain scalar stays text, which `scalar` then reads.
    try:
        return yaml.compose(text, Loader=yaml.BaseLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{name}, line {mark.line + 1}, column {mark.column + 1}" if mark else name
        what = ", ".join(part for part in (error.context, error.problem) if part)
        raise ConfigError(f"{place}: not valid YAML: {what}; check the indentation, colons and quotes here") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: not valid YAML: {' '.join(str(error).split())}") from error
    except RecursionError:
        raise _too_deep(name) from None


def _too_deep(place: str) -> ConfigError:
    return ConfigError(f"{place}: lists and sections are nested deeper than {_MAX_DEPTH} levels; write them flatter")


def _place(name: str, node: yaml.Node) -> str:
    return f"{name}, line {node.start_mark.line + 1}"


def _kind(node: yaml.Node) -> str:
    if isinstance(node, yaml.CollectionNode):
        return "a list" if isinstance(node, yaml.SequenceNode) else "keys with values"
    return "a single value"


class _Builder:
    """Turns YAML nodes into plain values and notes where the keys stand."""

    def __init__(self, name: str, folder: Path) -> None:
        self.marks: dict[KeyPath, Mark] = {}
        self._name = name
        self._folder = folder
        self._num_nodes = 0
        self._open: list[yaml.Node] = []

    def build(self, node: yaml.Node, path: KeyPath) -> Any:
        self._num_nodes += 1
        if self._num_nodes > _MAX_NODES:
            raise ConfigError(f"{self._name}: aliases expand to more than {_MAX_NODES} values; write them out")
        if any(node is parent for parent in self._open):
            raise ConfigError(f"{_place(self._name, node)}: this alias contains itself")
        if isinstance(node, yaml.ScalarNode):
            self._refuse_tag(node, ("tag:yaml.org,2002:str",))
            try:
                return scalar(node.value) if node.style is None else node.value
            except ValueError as error:
                raise ConfigError(f"{_place(self._name, node)}: {error}") from error
        if len(self._open) >= _MAX_DEPTH:
            raise _too_deep(_place(self._name, node))
        self._open.append(node)
        value: Any
        if isinstance(node, yaml.SequenceNode):
            self._refuse_tag(node, ("tag:yaml.org,2002:seq",))
            value = []
            for index, item in enumerate(node.value):
                self.marks[(*path, index)] = Mark(_place(self._name, item), self._folder)
                value.append(self.build(item, (*path, index)))
        else:
            self._refuse_tag(node, ("tag:yaml.org,2002:map",))
            value = self._build_mapping(node, path)
        self._open.pop()
        return value

    def _build_mapping(self, node: yaml.Node, path: KeyPath) -> dict[str, Any]:
        value: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            place = _place(self._name, key_node)
            section = ".".join(map(str, path)) or "the top level"
            if not isinstance(key_node, yaml.ScalarNode):
                raise ConfigError(f"{place}: a key in {section} is {_kind(key_node)}; keys are single words")
            key = key_node.value
            if key == "<<" and key_node.style is None:
                raise ConfigError(f"{place}: merge keys (<<) are not supported; write the keys out")
            if key in value:
                raise ConfigError(
                    f"{place}: key '{key}' in {section} is given twice, first in line {lines[key]}; remove one"
                )
            lines[key] = key_node.start_mark.line + 1
            self.marks[(*path, key)] = Mark(place, self._folder)
            value[key] = self.build(value_node, (*path, key))
        return value

    def _refuse_tag(self, node: yaml.Node, allowed: tuple[str, ...]) -> None:
        if node.tag is not None and node.tag not in (*allowed, "!"):
            raise ConfigError(f"{_place(self._name, node)}: tag '{node.tag}' is not supported; remove it")
