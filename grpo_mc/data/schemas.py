"""What the fields of a record mean: prompt, answer and domain in the schemas that people have.

    TRL      prompt: a string or a list of messages; any other columns, handed to reward functions
    verl     data_source, prompt: a list of messages, reward_model: {ground_truth}, extra_info
    others   question, problem or instruction for the prompt; answer, solution or ground_truth for the answer

A source's `template` replaces the prompt, and `chat` decides whether the chat template is applied to it.
"""

from __future__ import annotations

import json
import re
import string
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grpo_mc.config.data import Source
from grpo_mc.data.sources import Record
from grpo_mc.data.text import find_surrogate

Messages = tuple[dict[str, str], ...]

_PROMPT_FIELDS = ("prompt", "question", "problem", "instruction")
_ANSWER_FIELDS = ("answer", "solution", "ground_truth")
_PROBLEM_FIELDS = (*_PROMPT_FIELDS, "expression")
"""Fields that state the problem, each enough to know it again."""


@dataclass(frozen=True)
class Problem:
    """What a record asks, before tokenizing: exactly one of text and messages."""

    text: str | None
    """The raw prompt."""
    messages: Messages | None
    """The chat."""


def read_problem(record: Record, source: Source) -> Problem:
    """The prompt of a record.

    Raises:
        ValueError: the prompt is missing, empty or of another type; names place, field and value.
    """
    content: str | Messages
    if source.template is not None:
        content = fill_template(source.template, record)
    else:
        field = next((name for name in _PROMPT_FIELDS if record.fields.get(name) is not None), None)
        if field is None:
            have = ", ".join(record.fields) or "none"
            raise record.error(
                "prompt",
                f"a prompt is needed: one of the fields {', '.join(_PROMPT_FIELDS)} (it has: {have}), or a template",
            )
        content = prompt_content(record, field)
    chat = source.chat
    if chat is None:
        chat = source.template is None or not isinstance(content, str)
    if not chat:
        if not isinstance(content, str):
            raise record.error(
                "prompt", "a list of messages needs the chat template; set chat: true, or give a template"
            )
        if source.system_prompt is not None:
            raise ValueError("data source: system_prompt needs the chat template; set chat: true, or leave it out")
        return Problem(content, None)
    messages: Messages = ({"role": "user", "content": content},) if isinstance(content, str) else content
    if source.system_prompt is not None and find_surrogate(source.system_prompt) is not None:
        raise ValueError(
            f"data source: system_prompt is {source.system_prompt!r}; UTF-8 cannot hold half of a surrogate pair; "
            "write whole characters"
        )
    if source.system_prompt is not None and messages[0]["role"] != "system":
        messages = ({"role": "system", "content": source.system_prompt}, *messages)
    return Problem(None, messages)


def prompt_content(record: Record, field: str) -> str | Messages:
    """The prompt that stands in one field: a text, or messages with role and content.

    Raises:
        ValueError: it is empty or of another type; names place, field and value.
    """
    value = record.fields[field]
    if isinstance(value, str):
        if not value.strip():
            raise record.error(field, "a prompt with at least one character is needed")
        return _encodable(record, field, value)
    if not isinstance(value, list) or not value:
        raise record.error(field, "a text or a list of messages {role, content} is needed")
    return tuple(_message(record, field, at, message) for at, message in enumerate(value))


def fill_template(template: str, record: Record) -> str:
    """The python format string `template` over the record's fields; texts and numbers only.

    Raises:
        ValueError: a field that is missing or no text or number, or a broken template.
    """
    values = {}
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise ValueError(f"template {template!r}: {error}; write literal braces as {{{{ and }}}}") from error
    for name in names:
        if not name.isidentifier():
            # attribute and index access would reach into objects of the program
            raise ValueError(f"template {template!r}: {{{name}}} is no plain field name; use {{field}} only")
        value = record.fields.get(name)
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            have = ", ".join(record.fields)
            raise record.error(name, f"the template needs a text or a number there (fields: {have})")
        values[name] = _encodable(record, name, value) if isinstance(value, str) else value
    if find_surrogate(template) is not None:
        raise ValueError(f"template {template!r}: UTF-8 cannot hold half of a surrogate pair; write whole characters")
    try:
        return template.format(**values)
    except (ValueError, KeyError, IndexError) as error:
        raise ValueError(f"template {template!r} over {record.where}: {error}; correct the template") from error


def read_ground_truth(record: Record) -> str | None:
    """The reference answer: verl's reward_model.ground_truth, else answer, solution or ground_truth; None if absent."""
    reward_model = record.fields.get("reward_model")
    if reward_model is not None:
        if not isinstance(reward_model, Mapping):
            raise record.error("reward_model", "an object with the field ground_truth is needed")
        if reward_model.get("ground_truth") is not None:
            return _as_text(reward_model["ground_truth"])
    for name in _ANSWER_FIELDS:
        if record.fields.get(name) is not None:
            return _as_text(record.fields[name])
    return None


def read_data_source(record: Record, default: str) -> str:
    """The domain: verl's data_source, else reasoning-gym's source_dataset, else `default`."""
    for name in ("data_source", "source_dataset"):
        value = record.fields.get(name)
        if value is not None:
            if not isinstance(value, str):
                raise record.error(name, "the name of a domain is needed, a text")
            return value
    return default


def other_fields(record: Record) -> dict[str, Any]:
    """The columns that reward functions get: all but the prompt."""
    return {name: value for name, value in record.fields.items() if name != "prompt"}


def problem_keys(record: Record) -> set[str]:
    """The normalised texts by which a problem is known again, whatever the template around it.

    Each of the fields prompt, question, problem, instruction and expression gives one; of a chat the last user message.
    """
    keys = set()
    for name in _PROBLEM_FIELDS:
        value = record.fields.get(name)
        if isinstance(value, list):
            users = [m.get("content") for m in value if isinstance(m, Mapping) and m.get("role") == "user"]
            value = users[-1] if users else None
        if isinstance(value, str) and value.strip():
            keys.add(normalize(value))
    return keys


def normalize(text: str) -> str:
    """Unicode NFKC, lower case, no space beside punctuation, single spaces elsewhere: "3 + 4 =" and "3+4=" are one."""
    text = re.sub(r"\s+", " ", unicodedata.normalize("NFKC", text).casefold()).strip()
    return re.sub(r" ?([^\w ]) ?", r"\1", text)


def _as_text(value: Any) -> str:
    """Texts as they are, numbers as Python writes them, lists and objects as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    return json.dumps(value, ensure_ascii=False, default=str)


def _message(record: Record, field: str, at: int, message: Any) -> dict[str, str]:
    role = message.get("role") if isinstance(message, Mapping) else None
    content = message.get("content") if isinstance(message, Mapping) else None
    if isinstance(content, list) and all(isinstance(p, Mapping) and isinstance(p.get("text"), str) for p in content):
        content = "".join(part["text"] for part in content)
    if not isinstance(role, str) or not isinstance(content, str):
        raise record.error(field, f"message {at} needs a role and a content, both texts (no images or tool calls)")
    return {"role": _encodable(record, field, role, at), "content": _encodable(record, field, content, at)}


def _encodable(record: Record, field: str, text: str, message: int | None = None) -> str:
    """The text itself, once UTF-8 can hold it: tokenizers read bytes."""
    at = find_surrogate(text)
    if at is None:
        return text
    place = f"character {at}" if message is None else f"character {at} of a text of message {message}"
    raise record.error(
        field, f"{place} is {text[at]!r}, half of a surrogate pair, which UTF-8 cannot hold; write the whole character"
    )
