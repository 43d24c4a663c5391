"""Configuration keys as text: the values a key takes, its default, what it does; read off the schema itself."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from grpo_mc.config.base import Section, shorten
from grpo_mc.config.keys import section_classes, suggest
from grpo_mc.config.schema import Config

_BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
_PLAIN = {"float": "number", "int": "integer", "str": "text", "bool": "true | false", "NoneType": "null"}


def section_lines(path: str, section: type[Section]) -> Iterator[str]:
    """A section's keys, and those of the sections inside it.

    Args:
        path: The section's own key, e.g. "optimizer" or "data.train".
    """
    choice = _choice(section)
    yield f"{path}{f' with {choice[0]}: {choice[1]}' if choice else ''}: {' '.join((section.__doc__ or '').split())}"
    for name, field in section.model_fields.items():
        if not choice or name != choice[0]:
            yield from key_lines(f"{path}.{name}", field)
    for name, field in section.model_fields.items():
        yield from inner_section_lines(f"{path}.{name}", field)


def inner_section_lines(path: str, field: FieldInfo) -> Iterator[str]:
    """The sections that a key's value may be, each with its keys."""
    for inner in section_classes(field.annotation):
        yield ""
        yield from section_lines(path, inner)


def _choice(section: type[Section]) -> tuple[str, str] | None:
    """The key and the value that select this section among the alternatives of a union, e.g. ("kind", "jsonl")."""
    for name in ("kind", "type"):
        field = section.model_fields.get(name)
        if field is not None and get_origin(field.annotation) is Literal and field.is_required():
            return name, str(get_args(field.annotation)[0])
    return None


def key_lines(path: str, field: FieldInfo) -> list[str]:
    """One key: what it takes and its default, then what it does."""
    return [f"  {path}  ({value_text(field)}; {default_text(field)})", f"      {description(field)}"]


def description(field: FieldInfo) -> str:
    """What a key does, on one line."""
    return " ".join((field.description or "").split())


def value_text(field: FieldInfo) -> str:
    """The values that a key takes, e.g. "integer >= 1 | null"."""
    kinds = _kinds(field.annotation)
    bounds = [f"{sign} {_plain_number(getattr(mark, name))}" for mark in field.metadata
              for name, sign in _BOUNDS.items() if getattr(mark, name, None) is not None]  # fmt: skip
    if bounds:
        kinds[0] = f"{kinds[0]} {' and '.join(bounds)}"
    return " | ".join(kinds)


def default_text(field: FieldInfo) -> str:
    """The default as YAML would hold it."""
    if field.is_required():
        return "must be given"
    default = field.get_default(call_default_factory=True)
    if isinstance(default, Section):
        return "default: that of each key"
    return f"default {json.dumps(default, default=str)}"


def find_key(path: str) -> FieldInfo:
    """The field of a key.

    Args:
        path: "section", "section.key" and so on. Where a value may be one of several sections (`data.train`), a key of
            any of them is found.

    Raises:
        ValueError: There is no such key; the message names the one that was probably meant.
    """
    sections: list[type[Section]] = [Config]
    found: FieldInfo | None = None
    for depth, name in enumerate(path.split(".")):
        holders = [section for section in sections if name in section.model_fields]
        if not holders:
            parent = ".".join(path.split(".")[:depth])
            if not sections:
                raise ValueError(f"config explain: '{parent}' is a value and has no keys; ask for '{parent}'")
            where = f"'{shorten(parent)}'" if depth else "the configuration"
            raise ValueError(f"config explain: {where} has no key '{shorten(name)}'; {suggest(name, sections[0])}")
        found = holders[0].model_fields[name]
        sections = section_classes(found.annotation)
    assert found is not None  # split gives at least one name
    return found


def _kinds(annotation: Any) -> list[str]:
    """The alternatives of an annotation, in its order."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return [str(argument) for argument in arguments]
    if origin in (Union, types.UnionType):
        return list(dict.fromkeys(kind for argument in arguments for kind in _kinds(argument)))
    if origin is list:
        return [f"list of {' or '.join(_kinds(arguments[0]))}"]
    if origin is tuple:
        return [f"[{', '.join(' or '.join(_kinds(argument)) for argument in arguments if argument is not ...)}]"]
    if origin is not None and hasattr(annotation, "__metadata__"):  # Annotated
        return _kinds(arguments[0])
    if (
        origin is dict
        or annotation in (dict, Any)
        or (isinstance(annotation, type) and issubclass(annotation, Section))
    ):
        return ["any" if annotation is Any else "mapping"]
    return [_PLAIN.get(annotation.__name__, annotation.__name__)]


def _plain_number(bound: Any) -> str:
    return f"{bound:g}" if isinstance(bound, float) else str(bound)
