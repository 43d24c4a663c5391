"""Times an operator against its plain reference and the library baselines, alternating, in one process.

Each line gives shape, dtype, milliseconds (median), GFLOP/s or GB/s, and how many times faster or slower than the
baseline the operator is. In --json that is `ratio`, the baseline's time by ours: above 1 ours is faster. --compare
prints, beside each line, the change against an earlier --json file.
"""

from __future__ import annotations

import argparse
from pathlib import Path

EXAMPLES = """\
examples:
  grpo-mc bench --list
  grpo-mc bench token_logprobs
  grpo-mc bench all --json > operators.jsonl
  grpo-mc bench policy_loss --json > before.jsonl
  grpo-mc bench policy_loss --compare before.jsonl
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(usage_error=parser.error)
    parser.add_argument("operator", nargs="?", metavar="OP")
    parser.add_argument("--list", action="store_true", help="list the operators")
    parser.add_argument("--json", action="store_true", help="print one object a line")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="an earlier --json output")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to run (cpu)")


def run(args: argparse.Namespace) -> int:
    from grpo_mc.cli import calls

    names = calls.list_benchmarks()
    if args.list:
        print("\n".join(names))
        return 0
    if args.operator is None:
        args.usage_error("bench needs an OP, or --list")
    if args.operator not in (*names, "all"):
        raise ValueError(f"bench: no operator '{args.operator}'; operators are {', '.join(names)}, or all")
    return calls.run_benchmark(args.operator, as_json=args.json, compare=args.compare, device=args.device)
