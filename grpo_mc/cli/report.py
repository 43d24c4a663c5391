"""Writes one self-contained HTML file about a run: evaluations with error bars, curves, where the time goes, samples
with the reasons of their rewards, the objective and the configuration.

It works on a finished run, on one that is still going and on one that was killed; what is missing is said at the top.
"""

from __future__ import annotations

import argparse
from pathlib import Path

EXAMPLES = """\
examples:
  grpo-mc report runs/quickstart                     writes runs/quickstart/report.html
  grpo-mc report runs/quickstart --output /tmp/r.html
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="the run.dir of a training run")
    parser.add_argument("--output", metavar="FILE", type=Path, help="file to write (default: RUN_DIR/report.html)")


def run(args: argparse.Namespace) -> int:
    from grpo_mc.cli.inputs import refuse_missing
    from grpo_mc.monitor.report import read_run, summary_lines, write_report

    refuse_missing("report", args.run_dir, "the run.dir of a run")
    path = write_report(args.run_dir, args.output)
    for line in summary_lines(read_run(args.run_dir)):
        print(line)
    print(f"report: {path}")
    return 0
