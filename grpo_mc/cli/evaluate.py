"""Measures a model on the held-out prompts of evaluation.source: accuracy (greedy by default) and mean reward with
their errors, and pass@k.

Given a CONFIG it measures model.path; given a RUN_DIR it measures the model that the run wrote. Under torchrun the same
command runs on every rank.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

EXAMPLES = """\
examples:
  grpo-mc eval configs/quickstart.yaml
  grpo-mc eval runs/quickstart
  grpo-mc eval runs/quickstart evaluation.num_samples=8 evaluation.temperature=1.0 'evaluation.pass_k=[1,4,8]'
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [options] CONFIG|RUN_DIR [section.key=value ...]"
    parser.add_argument("arguments", nargs="+", metavar="CONFIG|RUN_DIR section.key=value",
                        help="a YAML file or a run directory, then overrides")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    from grpo_mc.cli import calls
    from grpo_mc.cli.inputs import refuse_missing, split_config_and_overrides
    from grpo_mc.monitor import ProgressDisplay
    from grpo_mc.monitor.run_files import to_line

    place, overrides = split_config_and_overrides(args.arguments, needs_config=True)
    assert place is not None
    refuse_missing("eval", place, "a configuration file or the run.dir of a run")
    if place.is_dir():
        # The run's own settings first, so that an override given here wins.
        overrides = [f"model.path={calls.trained_model(place)}", "model.tokenizer=null", *overrides]
        place = place / "config.yaml"
    config = calls.load_config(Path(place), overrides)
    if config.evaluation.source is None:
        raise ValueError(f"eval: {place} sets no evaluation.source; name held-out prompts there")
    # On standard error, so that standard output holds the figures alone.
    with ProgressDisplay(0, enabled=config.monitor.progress, stream=sys.stderr) as display:
        display.stage("evaluation")
        result = calls.evaluate(config, on_progress=display.progress)
    if calls.is_first_rank():
        print(to_line(result) if args.json else evaluation_lines(result), end="")
    return 0


def evaluation_lines(result: dict[str, Any]) -> str:
    """The main figure on the first line, every other one below it; none twice."""
    from grpo_mc.monitor.evaluations import MAIN_FIGURES, evaluation_text
    from grpo_mc.monitor.formats import format_measured, format_number

    errors = {error for _, names in MAIN_FIGURES for error in names}
    lines = [evaluation_text(result)]
    for name, value in result.items():
        if name in ("accuracy", "n") or name in errors:
            continue
        is_measured = name == "reward_mean" and "reward_stderr" in result
        shown = format_measured(value, result["reward_stderr"]) if is_measured else format_number(value)
        lines.append(f"  {name:<16} {shown}")
    return "\n".join(lines) + "\n"
