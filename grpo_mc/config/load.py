"""Reading a configuration: file, then command line overrides, then validation, then `resolve`.

Every mistake is found in one pass and reported with its place, the key, the value and what is needed, before anything
else of the run starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from grpo_mc.config.base import ConfigError
from grpo_mc.config.errors import describe_all, with_places
from grpo_mc.config.keys import unknown_keys
from grpo_mc.config.overrides import apply_overrides
from grpo_mc.config.paths import with_absolute_paths
from grpo_mc.config.presets import PRESETS
from grpo_mc.config.resolve import resolve
from grpo_mc.config.schema import Config
from grpo_mc.config.strict_yaml import Document, parse_yaml


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Reads a configuration file and applies command line overrides.

    Args:
        path: the YAML file. Relative input paths in it are taken from its folder.
        overrides: "section.key=value" arguments; relative paths in them are taken from the working directory.

    Returns:
        The resolved configuration (see `resolve`): presets applied, input paths and run.dir absolute.

    Raises:
        ConfigError: the file cannot be read, is not valid, or contradicts itself.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"config file {path}: cannot be read: {reason}; give the path of a YAML file") from error
    return load_config_text(text, overrides, name=str(path), folder=path.absolute().parent)


def load_config_text(
    text: str, overrides: Sequence[str] = (), *, name: str = "config", folder: str | Path = "."
) -> Config:
    """Reads a configuration from text; see `load_config`.

    Args:
        text: YAML.
        overrides: "section.key=value" arguments.
        name: what messages call the text.
        folder: relative input paths are taken from here.
    """
    document = parse_yaml(text, name, Path(folder).absolute())
    run = document.data.get("run")
    if isinstance(run, dict) and "resume" in run:
        mark = document.mark(("run", "resume"))
        place = mark.place if mark else name
        raise ConfigError(f"{place}: run.resume is set by --resume RUN_DIR, not in a file; remove it")
    _refuse_idle_preset(document, overrides)
    document = apply_overrides(document, list(overrides))
    config = with_absolute_paths(_validate(document, name), document)
    try:
        return resolve(config)
    except ConfigError as error:
        raise ConfigError(with_places(str(error), document)) from error


def to_yaml(config: Config) -> str:
    """The configuration as YAML text; of a resolved one, loading the text gives the same configuration.

    dp, etp and sequence_parallel are null where they followed from the launch, so that the run can go on under another.
    """
    data = config.model_dump(mode="json", exclude={"run": {"resume"}})
    for key in ("dp", "etp", "sequence_parallel"):
        if key not in config.parallel.model_fields_set:
            data["parallel"][key] = None
    return yaml.dump(data, Dumper=_PlainDumper, sort_keys=False, allow_unicode=False, width=120)


class _PlainDumper(yaml.SafeDumper):
    """Writes floats so that every YAML reader takes them for numbers, and no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_float(dumper: yaml.SafeDumper, value: float) -> yaml.ScalarNode:
    text = repr(value)
    if "e" in text and "." not in text:  # 1e-06 is text to YAML 1.1 readers, 1.0e-06 is a number to all
        text = text.replace("e", ".0e")
    return dumper.represent_scalar("tag:yaml.org,2002:float", text)


_PlainDumper.add_representer(float, _represent_float)


def _refuse_idle_preset(document: Document, overrides: Sequence[str]) -> None:
    """A preset named on the command line that a fully written file (config.yaml of a run) leaves nothing to fill."""
    algorithm = document.data.get("algorithm")
    names = [override.partition("=")[2] for override in overrides if override.startswith("algorithm.preset=")]
    preset = PRESETS.get(names[-1]) if names else None
    if preset is None or not isinstance(algorithm, dict) or not set(preset.algorithm) <= set(algorithm):
        return
    differ = [key for key, value in preset.algorithm.items() if algorithm[key] != value]
    if differ:
        raise ConfigError(
            f"command line, algorithm.preset={preset.name}: changes nothing, because the file sets every field of the "
            f"preset and a field that is set wins ({', '.join(differ)} differ); override these fields one by one"
        )


def _validate(document: Document, name: str) -> Config:
    data = {key: {} if value is None and key in Config.model_fields else value for key, value in document.data.items()}
    problems = unknown_keys(Document(data, document.marks))
    try:
        config = Config.model_validate(data)
    except ValidationError as error:
        problems += describe_all(error, Document(data, document.marks), name, has_unknown=bool(problems))
    if problems:
        raise ConfigError("\n".join(problems))
    return config
