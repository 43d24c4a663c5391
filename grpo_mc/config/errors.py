"""Pydantic's validation errors as messages with the place, section.key, the value and what was needed."""

from __future__ import annotations

import difflib
from typing import Any, get_args

from pydantic_core import ErrorDetails

from grpo_mc.config.data import DataConfig
from grpo_mc.config.keys import section_classes
from grpo_mc.config.rewards import RewardsConfig
from grpo_mc.config.strict_yaml import Document, KeyPath

_TAGS = {
    tag: [get_args(section.model_fields[tag].annotation)[0] for section in section_classes(annotation)]
    for tag, annotation in (
        ("kind", DataConfig.model_fields["train"].annotation),
        ("type", RewardsConfig.model_fields["functions"].annotation),
    )
}
"""What `kind` of a source and `type` of a reward function may be."""


def _key_path(location: tuple[int | str, ...], data: Any) -> KeyPath:
    """The keys that lead to an error, without the tags of unions that pydantic puts among them."""
    path: list[str | int] = []
    for index, part in enumerate(location):
        if isinstance(data, dict) and part in data:
            path.append(part)
            data = data[part]
        elif isinstance(data, list) and isinstance(part, int):
            path.append(part)
            data = data[part] if part < len(data) else None
        elif index == len(location) - 1 and isinstance(data, dict):
            path.append(part)
    return tuple(path)


def describe(detail: ErrorDetails, data: Any, document: Document, name: str) -> str:
    """A pydantic error as place, section.key, the value and what was needed."""
    path = _key_path(detail["loc"], data)
    mark = document.mark(path)
    place = mark.place if mark else name
    key = ".".join(map(str, path)) or "the configuration"
    kind, context = detail["type"], detail.get("ctx", {})
    if kind == "missing":
        return f"{place}: {key} is missing; it has no default"
    got = _show(detail["input"])
    if kind == "value_error":
        return f"{place}: {key}: {context['error']}"
    if kind == "union_tag_not_found":
        tag = str(context["discriminator"]).strip("'")
        kinds = "one of " + ", ".join(_TAGS[tag]) if tag in _TAGS else ""
        return f"{place}: {key} needs the key '{tag}', {kinds}"
    if kind == "union_tag_invalid":
        tag, expected = str(context["discriminator"]).strip("'"), context["expected_tags"]
        return f"{place}: {key}.{tag} is {_show(context['tag'])}; it needs one of {expected}" + _nearest_choice(
            context["tag"], expected
        )
    needed = detail["msg"].replace("Input should be ", "")
    hint = _nearest_choice(detail["input"], str(context.get("expected", ""))) if kind == "literal_error" else ""
    return f"{place}: {key} is {got}; it needs {needed}{hint}"


def _show(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, dict):
        return "a mapping" if value else "an empty mapping"
    text = repr(value)
    text = text if len(text) <= 80 else text[:77] + "..."
    return f"{text} (text)" if isinstance(value, str) else text


def _nearest_choice(value: Any, expected: str) -> str:
    choices = [part for part in expected.replace(" or ", ",").replace("'", "").replace(" ", "").split(",") if part]
    near = difflib.get_close_matches(str(value).lower().replace("-", "_"), choices, n=1)
    return f"; did you mean '{near[0]}'?" if near else ""
