"""Trains a model with GRPO as CONFIG says, and writes metrics, checkpoints and a report into run.dir.

Under torchrun the same command runs on every rank. Overrides are section.key=value and win over the file. --dry-run
prints the resolved configuration, the objective as a formula, the mesh, a memory estimate, the prompts and one scored
reward, and stops. --resume goes on with a run from its newest complete checkpoint; the run's own config.yaml holds,
with the overrides given.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from grpo_mc.config import Config

EXAMPLES = """\
examples:
  grpo-mc train configs/quickstart.yaml
  grpo-mc train configs/quickstart.yaml rollout.group_size=16 optimizer.lr=2e-6 run.dir=runs/g16
  grpo-mc train configs/quickstart.yaml --dry-run
  torchrun --nproc-per-node 4 -m grpo_mc train configs/quickstart.yaml parallel.tp=2
  grpo-mc train --resume runs/quickstart run.steps=200
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [options] CONFIG [section.key=value ...]"
    parser.add_argument("arguments", nargs="*", metavar="CONFIG section.key=value",
                        help="the YAML file (left out with --resume), then overrides")  # fmt: skip
    parser.add_argument("--resume", metavar="RUN_DIR", type=Path, help="go on with this run")
    parser.add_argument("--dry-run", action="store_true", help="explain the run and stop before any process group")


def run(args: argparse.Namespace) -> int:
    from grpo_mc.cli import calls
    from grpo_mc.cli.inputs import refuse_missing, split_config_and_overrides

    config_path, overrides = split_config_and_overrides(args.arguments, needs_config=args.resume is None)
    if args.resume is not None:
        if config_path is not None:
            raise ValueError(
                f"train --resume: got the config file {config_path} too; the run's own config.yaml holds, "
                "give changes as section.key=value"
            )
        refuse_missing("train --resume", args.resume, "the run.dir of a run")
        config_path = args.resume / "config.yaml"
        if not config_path.is_file():
            raise FileNotFoundError(f"train --resume: {args.resume} holds no config.yaml; give the run.dir of a run")
        # run.dir in the file is the place the run was made at; the directory may have moved since.
        overrides = [*overrides, f"run.dir={args.resume}"]
    assert config_path is not None
    config = calls.load_config(config_path, overrides)
    if args.dry_run:
        from grpo_mc.cli.dry_run import explain

        if calls.is_first_rank():
            explain(calls.with_layout(config))
        return 0
    return _train(calls.mark_resumed(config) if args.resume is not None else config, args.resume)


def _train(config: Config, resume_dir: Path | None) -> int:
    from grpo_mc.cli import calls
    from grpo_mc.config import check_trainable, config_warnings
    from grpo_mc.monitor import RunMonitor, write_report
    from grpo_mc.monitor.report import read_run, summary_lines
    from grpo_mc.pipeline.stop import Interrupted

    check_trainable(config)
    run_dir = Path(config.run.dir)
    if calls.is_first_rank():
        for warning in config_warnings(config):
            print(f"grpo-mc: warning: {warning}", file=sys.stderr)
    with RunMonitor(run_dir, config) as monitor:
        try:
            calls.train(config, resume_dir=resume_dir, sink=monitor)
        except KeyboardInterrupt:  # during the set-up, or the second Ctrl-C
            raise Interrupted(signal.SIGINT, interruption_text(run_dir)) from None
    if calls.is_first_rank():
        path = write_report(run_dir)
        if not monitor.display.is_shown:  # else they stand above, each where it was made
            for line in summary_lines(read_run(run_dir)):
                print(line)
        print(f"report: {path}")
        if (run_dir / calls.EXPORT_DIR).is_dir():
            place = shlex.quote(str(run_dir))
            print(f"next: grpo-mc eval {place}, or grpo-mc generate {place} --prompt TEXT")
    return 0


def interruption_text(run_dir: Path) -> str:
    """What a run leaves that Ctrl-C ended at once, and how to go on."""
    from grpo_mc.monitor.run_files import CHECKPOINTS_DIR, METRICS_FILE, read_line_file

    if any((run_dir / CHECKPOINTS_DIR).glob("step_*")):
        return f"interrupted; go on from the last saved step with `grpo-mc train --resume {run_dir}`"
    if read_line_file(run_dir / METRICS_FILE).records:
        return f"interrupted, and no step is saved; start again with another run.dir, or delete {run_dir}"
    return "interrupted before the first step: nothing was saved, start again with the same command"
