"""Pydantic's validation errors as messages with the place, section.key, the value and what was needed."""

from __future__ import annotations

import difflib
import re
from typing import Any, get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from grpo_mc.config.base import shorten
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


_NEEDED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "dict_type": "a mapping of keys to values",
    "model_type": "a mapping of keys to values",
    "model_attributes_type": "a mapping of keys to values",
    "missing": "more values",
    "string_too_short": "text that is not empty",
}
"""pydantic's kinds of errors in the words of a configuration file."""


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


def describe_all(error: ValidationError, document: Document, name: str, *, has_unknown: bool) -> list[str]:
    """One message for every error; unknown keys are left out, since `unknown_keys` reports them.

    Args:
        error: from validating the document's data.
        document: what was validated, with its marks.
        name: the file's name, where no mark is near.
        has_unknown: an unknown key was found: then a missing key beside it is mostly the same mistake, and left out.
    """
    left_out = {"extra_forbidden", "missing"} if has_unknown else {"extra_forbidden"}
    details = [detail for detail in error.errors() if detail["type"] not in left_out]
    return [_describe(detail, _key_path(detail["loc"], document.data), document, name) for detail in details]


def with_places(message: str, document: Document) -> str:
    """The message with, at the end of every line, the places of the keys that the line names as section.key."""
    lines = []
    for line in message.split("\n"):
        names = re.findall(r"\b[a-z_]+(?:\.[a-z_0-9]+)+", line)
        paths = [tuple(int(part) if part.isdigit() else part for part in name.split(".")) for name in names]
        # A value that is set as part of a whole (`source={...}`) has the whole's place; a section has none.
        prefixes = [[path[:length] for length in range(len(path), 1, -1)] for path in paths]
        found = [next((prefix for prefix in some if prefix in document.marks), None) for some in prefixes]
        places = dict.fromkeys(document.marks[path].place for path in found if path is not None)
        lines.append(f"{line} ({'; '.join(places)})" if places else line)
    return "\n".join(lines)


def _describe(detail: ErrorDetails, path: KeyPath, document: Document, name: str) -> str:
    """A pydantic error as place, section.key, the value and what was needed."""
    mark = document.mark(path)
    place = mark.place if mark else name
    key = ".".join(map(str, path)) or "the configuration"
    kind, context = detail["type"], detail.get("ctx", {})
    if kind == "missing" and not (path and isinstance(path[-1], int)):
        return f"{place}: {key} is missing; it has no default"
    if kind == "value_error":
        # A check of a whole section names its fields in the text; point at them rather than at the section.
        words = re.findall(r"[a-z_]+", str(context["error"]))
        marks = [document.marks[(*path, word)] for word in words if (*path, word) in document.marks]
        place = "; ".join(dict.fromkeys(mark.place for mark in marks)) or place
        return f"{place}: {key}: {context['error']}"
    if kind == "union_tag_not_found":
        tag = str(context["discriminator"]).strip("'")
        return f"{place}: {key} needs the key '{tag}', one of {', '.join(_TAGS[tag])}"
    if kind == "union_tag_invalid":
        tag, given, expected = str(context["discriminator"]).strip("'"), context["tag"], context["expected_tags"]
        place = document.marks[(*path, tag)].place if (*path, tag) in document.marks else place
        return f"{place}: {key}.{tag} is {_show(given)}; it needs one of {expected}{_nearest_choice(given, expected)}"
    needed = _NEEDED.get(kind) or detail["msg"].replace("Input should be ", "")
    if needed.startswith(("greater", "less")):
        needed = f"a number {needed}"
    hint = _nearest_choice(detail["input"], str(context.get("expected", ""))) if kind == "literal_error" else ""
    return f"{place}: {key} is {_show(detail['input'])}; it needs {needed}{hint}"


def _show(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, dict):
        return "a mapping" if value else "an empty mapping"
    text = shorten(repr(value))
    return f"{text} (text)" if isinstance(value, str) else text


def _nearest_choice(value: Any, expected: str) -> str:
    choices = [part for part in expected.replace(" or ", ",").replace("'", "").replace(" ", "").split(",") if part]
    near = difflib.get_close_matches(str(value).lower().replace("-", "_"), choices, n=1)
    return f"; did you mean '{near[0]}'?" if near else ""
