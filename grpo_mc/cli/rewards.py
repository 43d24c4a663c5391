"""Lists and explains reward functions, and tries them on responses, without a model or a run.

  list                 the types, one line each
  explain TYPE         what a type does, and its options with defaults
  score FILE           judges a JSONL file of responses: one object a line with `response` and, where the function needs
                       them, `prompt`, `ground_truth` and other columns; consecutive lines with one prompt are a group

The functions come from a configuration (--config) or from --reward, as often as wanted: a type alone, or a YAML
mapping with options.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

EXAMPLES = """\
examples:
  grpo-mc rewards list
  grpo-mc rewards explain numeric
  grpo-mc rewards score responses.jsonl --reward math
  grpo-mc rewards score responses.jsonl --reward '{type: numeric, tolerance: 0.01}' --reward format
  grpo-mc rewards score responses.jsonl --config configs/quickstart.yaml --json

a line of responses.jsonl: {"prompt": "1 + 1 =", "response": "The sum is 2.", "ground_truth": "2"}
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(usage_error=parser.error)
    parser.add_argument("action", choices=["list", "explain", "score"])
    parser.add_argument("target", nargs="?", help="the TYPE to explain, or the FILE to score (- = standard input)")
    parser.add_argument("--reward", action="append", default=[], metavar="TYPE|MAPPING", help="a reward function")
    parser.add_argument("--config", type=Path, metavar="CONFIG", help="take the functions of this configuration")
    parser.add_argument("--json", action="store_true", help="print one object a response")


def run(args: argparse.Namespace) -> int:
    if args.action == "list":
        return _list()
    if args.target is None:
        args.usage_error(f"rewards {args.action} needs {'a TYPE' if args.action == 'explain' else 'a FILE'}")
    return _explain(args.target) if args.action == "explain" else _score(args)


def _list() -> int:
    from grpo_mc.cli import calls

    for name, summary in calls.reward_types().items():
        print(f"{name:<16} {summary}")
    return 0


def _explain(reward_type: str) -> int:
    from grpo_mc.cli import calls
    from grpo_mc.cli.reward_text import option_lines

    lines = option_lines(reward_type)
    print(calls.explain_reward(reward_type).rstrip())
    print("\noptions\n" + "\n".join(lines))
    return 0


def _score(args: argparse.Namespace) -> int:
    from grpo_mc.cli import calls
    from grpo_mc.cli.inputs import parse_rewards
    from grpo_mc.cli.reward_text import summary_text, verdict_lines
    from grpo_mc.data.text import printable
    from grpo_mc.monitor.metrics import sample_record
    from grpo_mc.monitor.run_files import to_line
    from grpo_mc.rewards.files import read_responses, score_responses

    if (args.config is None) == (not args.reward):
        raise ValueError("rewards score: give either --config CONFIG or at least one --reward TYPE")
    rewards = calls.load_config(args.config, []).rewards if args.config else parse_rewards(args.reward)
    if not rewards.functions:
        raise ValueError(f"rewards score: {args.config} sets no rewards.functions; set them or use --reward")
    groups = read_responses(args.target)
    score_responses(groups, rewards)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    for number, rollout in enumerate(rollouts):
        if args.json:
            record = sample_record(0, rollout)
            dropped = ("step", "response_length", "finish_reason")
            print(to_line({key: value for key, value in record.items() if key not in dropped}), end="")
        else:
            print(f"{number}: {printable(json.dumps(rollout.text, ensure_ascii=False)[:100])}")
            print("\n".join(verdict_lines(rollout)))
    if not args.json:
        print(summary_text(groups))
    return 0
