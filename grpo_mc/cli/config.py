"""Explains the keys of a configuration file and lists the named objectives.

  explain [KEY ...]    what a key takes, its default and what it does; a section shows all its keys; without KEY, all
  presets [NAME ...]   the named objectives (`algorithm.preset`), one line each; with NAME, the values each one sets

`grpo-mc train CONFIG --dry-run` shows the values that a given file leads to.
"""

from __future__ import annotations

import argparse
import json

EXAMPLES = """\
examples:
  grpo-mc config explain optimizer
  grpo-mc config explain rollout.temperature algorithm.clip_high
  grpo-mc config explain > keys.txt
  grpo-mc config presets
  grpo-mc config presets dapo
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=["explain", "presets"])
    parser.add_argument("names", nargs="*", metavar="KEY|NAME", help="keys to explain, or presets to show")


def run(args: argparse.Namespace) -> int:
    lines = _explain(args.names) if args.action == "explain" else _presets(args.names)
    print("\n".join(lines))
    return 0


def _explain(paths: list[str]) -> list[str]:
    from grpo_mc.cli.key_text import find_key, inner_section_lines, key_lines
    from grpo_mc.config import Config

    blocks = []
    for path in paths or list(Config.model_fields):
        field = find_key(path)
        inner = list(inner_section_lines(path, field))[1:]
        # A section at the top is its keys; a key below may hold sections and still has a line of its own.
        blocks.append(
            inner if inner and "." not in path else [*key_lines(path, field), *([""] if inner else []), *inner]
        )
    return [line for number, block in enumerate(blocks) for line in ([""] if number else []) + block]


def _presets(names: list[str]) -> list[str]:
    from grpo_mc.config import PRESETS
    from grpo_mc.config.resolve import find_preset

    if not names:
        return [f"{preset.name:<20} {preset.summary}" for preset in PRESETS.values()]
    lines: list[str] = []
    for preset in map(find_preset, names):
        lines += [f"{preset.name}: {preset.summary}"]
        values = {f"algorithm.{key}": json.dumps(value) for key, value in preset.algorithm.items()}
        if preset.group_size is not None:
            values["rollout.group_size"] = str(preset.group_size)
        if preset.overlong_fraction is not None:
            values["algorithm.overlong_buffer"] = f"{preset.overlong_fraction:g} of rollout.max_new_tokens"
        lines += [f"  {key:<32} {value}" for key, value in values.items()]
    return lines
