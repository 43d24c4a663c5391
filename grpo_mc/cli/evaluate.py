"""Measures a model on the held-out prompts of evaluation.source: accuracy (greedy by default), pass@k and mean reward,
each with its standard error.

Given a CONFIG it measures model.path; given a RUN_DIR it measures the model that the run wrote. Under torchrun the same
command runs on every rank.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

EXAMPLES = """\
examples:
  grpo-mc eval configs/quickstart.yaml
  grpo-mc eval runs/quickstart
  grpo-mc eval runs/quickstart evaluation.num_samples=8 evaluation.temperature=1.0 'evaluation.pass_k=[1,4,8]'
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("arguments", nargs="+", metavar="CONFIG|RUN_DIR section.key=value",
                        help="a YAML file or a run directory, then overrides")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    from grpo_mc.cli import calls
    from grpo_mc.cli.inputs import split_config_and_overrides
    from grpo_mc.monitor.run_files import to_line

    place, overrides = split_config_and_overrides(args.arguments, needs_config=True)
    assert place is not None
    if place.is_dir():
        # The run's own settings first, so that an override given here wins.
        overrides = [f"model.path={calls.trained_model(place)}", "model.tokenizer=null", *overrides]
        place = place / "config.yaml"
    config = calls.load_config(Path(place), overrides)
    if config.evaluation.source is None:
        raise ValueError(f"eval: {place} sets no evaluation.source; name held-out prompts there")
    result = calls.evaluate(config)
    if calls.is_first_rank():
        print(to_line(result) if args.json else evaluation_text(result), end="")
    return 0


def evaluation_text(result: dict[str, Any]) -> str:
    """The main figure on the first line, every other one below it."""
    from grpo_mc.monitor.sink import evaluation_line

    first = evaluation_line(int(result.get("step", 0)), result)
    others = [f"  {name:<24} {value}" for name, value in result.items() if name != "step"]
    return "\n".join([first, *others]) + "\n"
