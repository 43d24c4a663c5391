"""Looks at this machine and this installation, and says what to do about what is wrong: cores, memory, disk, Python and
package versions against the tested ones, compiled operators, ports, a bounded process group of two processes, writing
to the working directory and to the cache.

Exit status 1 if a check fails; warnings do not change it.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

EXAMPLES = """\
examples:
  grpo-mc doctor
  grpo-mc doctor --json | jq 'select(.status != "ok")'
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one object a check")
    parser.add_argument("--probe-timeout-s", type=float, default=60.0, help="bound of the process-group probe (60)")


def run(args: argparse.Namespace) -> int:
    from grpo_mc.cli.doctor_checks import all_checks
    from grpo_mc.monitor.formats import counted

    failed = warned = 0
    for check in all_checks(args.probe_timeout_s):
        failed += check.status == "fail"
        warned += check.status == "warn"
        if args.json:
            print(json.dumps(asdict(check)), flush=True)
        else:
            print(f"{check.status.upper():<5}{check.name:<22}{check.detail}", flush=True)
            if check.advice:
                print(f"{'':<27}-> {check.advice}", flush=True)
    if not args.json:
        print(f"{failed} failed, {counted(warned, 'warning')}" if failed or warned else "ready")
    return 1 if failed else 0
