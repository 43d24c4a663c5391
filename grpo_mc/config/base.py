"""The base of every configuration section, and the marks that make paths relative to the file that names them.

Sections are frozen and refuse keys they do not know. They are strict: a number written as text is a mistake, not a
number. The docstring literal under a field is its description, with its unit; error messages and `--help` show it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict


class ConfigError(ValueError):
    """A configuration that the user has to change. The message names the key, the value and what is needed."""


def shorten(text: str) -> str:
    """The text as messages show it: cut to 80 characters."""
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"


class Section(BaseModel):
    """A frozen group of settings that refuses unknown keys and values of the wrong type."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


SectionType = TypeVar("SectionType", bound=Section)


def derive(section: SectionType, **values: Any) -> SectionType:
    """A copy with fields filled in that stay "not set by the user", so that what is derived can be derived anew."""
    is_set = set(section.model_fields_set)
    copy = section.model_copy(update=values)
    copy.__pydantic_fields_set__.intersection_update(is_set)
    return copy


@dataclass(frozen=True)
class PathMark:
    """Marks a field as a path that is read: relative ones are taken from the folder of the file that names them."""

    kind: str = "path"
    """"path"; "function" for "file.py:name" or "package.module:name", of which only the file is a path; "model" for a
    path or "package:NAME"."""


InputPath = Annotated[str, PathMark()]
FunctionPath = Annotated[str, PathMark("function")]
ModelPath = Annotated[str, PathMark("model")]
