"""Input paths made absolute: each is taken from the folder of what names it, a file or the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel

from grpo_mc.config.base import PathMark
from grpo_mc.config.strict_yaml import Document, KeyPath

Model = TypeVar("Model", bound=BaseModel)


def with_absolute_paths(model: Model, document: Document, path: KeyPath = ()) -> Model:
    """The configuration, or its section under `path`, with every path that the document sets made absolute."""
    update: dict[str, Any] = {}
    for name in model.model_fields_set:
        field = type(model).model_fields[name]
        mark = next((item for item in field.metadata if isinstance(item, PathMark)), None) or _find(field.annotation)
        update[name] = _convert_value(getattr(model, name), mark, document, (*path, name))
    return model.model_copy(update=update)


def _convert_value(value: Any, mark: PathMark | None, document: Document, path: KeyPath) -> Any:
    if isinstance(value, BaseModel):
        return with_absolute_paths(value, document, path)
    if isinstance(value, list):
        return [_convert_value(item, mark, document, (*path, index)) for index, item in enumerate(value)]
    if mark is None or not isinstance(value, str):
        return value
    place = document.mark(path)
    folder = place.folder if place else Path.cwd()
    if mark.kind == "model" and value.startswith("package:"):
        return value
    if mark.kind == "function":
        file, _, name = value.rpartition(":")
        return f"{_absolute(file, folder)}:{name}" if file.endswith(".py") else value
    return _absolute(value, folder)


def _absolute(path: str, folder: Path) -> str:
    return str((folder / Path(path).expanduser()).resolve())


def _find(annotation: Any) -> PathMark | None:
    """The mark inside a type such as `InputPath | None` or `list[InputPath]`; none inside a section's own type."""
    for item in getattr(annotation, "__metadata__", ()):
        if isinstance(item, PathMark):
            return item
    for argument in get_args(annotation):
        mark = _find(argument)
        if mark is not None:
            return mark
    return None
