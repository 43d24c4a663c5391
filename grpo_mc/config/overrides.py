"""`section.key=value` arguments of the command line, applied to a document.

A value is YAML, except that a key that takes text takes it as it stands (quotes are optional): `run.name=7` is the text
"7". Items of a list are named by their position: `rewards.functions.0.weight=2`. Relative paths are taken from the
working directory.
"""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any, Union, get_args, get_origin

from grpo_mc.config.base import ConfigError, Section, shorten
from grpo_mc.config.keys import pick_section, suggest
from grpo_mc.config.schema import Config
from grpo_mc.config.strict_yaml import Document, KeyPath, Mark, parse_value


def apply_overrides(document: Document, overrides: list[str]) -> Document:
    """The document with the overrides applied in order; the one given is not changed.

    Raises:
        ConfigError: an argument is not section.key=value, names no place in the configuration, or is not YAML.
    """
    data: Any = document.data
    marks = dict(document.marks)
    for override in overrides:
        name, separator, text = override.partition("=")
        place = f"command line, {shorten(override)}"
        if not separator or not all(name.split(".")):
            raise ConfigError(f"{place}: needs section.key=value, e.g. optimizer.lr=1e-6")
        if "." not in name and name not in Config.model_fields:
            raise ConfigError(
                f"{place}: needs section.key=value; '{shorten(name)}' is no section, {suggest(name, Config)}"
            )
        path: KeyPath = tuple(int(part) if part.isdecimal() and len(part) < 10 else part for part in name.split("."))
        value = _value(path, text, place, data)
        data = _with_value(data, path, value, place, ())
        marks = {key: mark for key, mark in marks.items() if key[: len(path)] != path}
        mark = Mark(place, Path.cwd())
        for length in range(1, len(path)):
            marks.setdefault(path[:length], mark)
        marks[path] = mark
    return Document(data, marks)


def _with_value(current: Any, path: KeyPath, value: Any, place: str, done: KeyPath) -> Any:
    """A copy of `current` in which what `path` names is `value`."""
    if not path:
        return value
    key, rest = path[0], path[1:]
    here = ".".join(map(str, done)) or "the top level"
    if isinstance(current, list):
        if not isinstance(key, int) or key >= len(current):
            raise ConfigError(f"{place}: {here} is a list of {len(current)}; name an item by its position from 0")
        changed = list(current)
        changed[key] = _with_value(current[key], rest, value, place, (*done, key))
        return changed
    if current is None:
        current = {}
    if not isinstance(current, dict):
        raise ConfigError(f"{place}: {shorten(here)} is {shorten(repr(current))} and has no key '{shorten(str(key))}'")
    if isinstance(key, int) and not current:
        raise ConfigError(f"{place}: {here} is empty and has no item {key}; set the whole list in the file")
    return {**current, str(key): _with_value(current.get(str(key)), rest, value, place, (*done, key))}


def _value(path: KeyPath, text: str, place: str, data: Any) -> Any:
    if _takes_text(path, data) and text.strip() not in ("", "null", "~") and text.strip()[:1] not in "\"'":
        return text
    return parse_value(text, place)


def _takes_text(path: KeyPath, data: Any) -> bool:
    """Whether the key that `path` names takes text and no list or mapping."""
    annotation: Any = Config
    for part in path:
        data = data.get(part) if isinstance(data, dict) else data[part] if _has_item(data, part) else None
        if isinstance(part, int) and get_origin(annotation) is list:
            annotation = get_args(annotation)[0]
        elif _is_section(annotation) and str(part) in annotation.model_fields:
            annotation = annotation.model_fields[str(part)].annotation
        else:
            return False
        if isinstance(data, dict):
            annotation = pick_section(annotation, data) or annotation
    if isinstance(data, dict):
        return False
    options = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    plain = [get_args(option)[0] if hasattr(option, "__metadata__") else option for option in options]
    return str in plain and all(option in (str, type(None)) for option in plain)


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def _has_item(data: Any, part: str | int) -> bool:
    return isinstance(data, list) and isinstance(part, int) and part < len(data)
