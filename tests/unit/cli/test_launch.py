"""Under torchrun: a mistake on every rank ends the launcher with a failure and names itself."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from helpers.processes import run_command


@pytest.mark.dist
def test_a_users_mistake_ends_the_launcher_with_a_failure(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "--no-python"]
    command = [*launcher, sys.executable, "-m", "grpo_mc", "train", str(tmp_path / "none_such.yaml")]
    done = run_command(command, timeout_s=90, check=False)
    assert done.returncode != 0
    assert "none_such.yaml: cannot be read: No such file or directory" in done.output
    assert "exitcode" in done.output and ": 2" in done.output
    assert done.output.count("grpo-mc: error: ") == 1 and "grpo-mc: error on rank 1: " in done.output
    assert re.search("traceback : .*none_such.yaml: cannot be read", done.output), "the launcher's summary says it too"
    assert "grpo_mc/cli" not in done.output, "no traceback of ours"
