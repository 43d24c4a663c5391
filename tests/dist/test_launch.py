"""The scripts of tools/launch: two hosts really meet over a network, a failing host ends both, Slurm's variables."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.processes import REPOSITORY, run_command

pytestmark = pytest.mark.dist
LAUNCH = REPOSITORY / "tools/launch"

RANK_SCRIPT = """
import os, sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
address = os.popen("ip -4 -br addr show eth0").read().split()[2]
print(f"rank {dist.get_rank()} at {address} sum {total.item()}", flush=True)
if "fail" in sys.argv and dist.get_rank() == 1:
    sys.exit(3)
if "fail" in sys.argv:
    import time
    time.sleep(300)
"""


def _namespaces() -> set[str]:
    listed = subprocess.run(["ip", "netns"], capture_output=True, text=True, timeout=10).stdout
    return {line.split()[0] for line in listed.splitlines() if line.startswith("grpo")}


@pytest.fixture
def two_hosts(tmp_path: Path) -> list[str | Path]:
    """The command line up to the rank script's arguments; skips where network namespaces cannot be made."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    probe = f"grpo-probe-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", probe], capture_output=True, timeout=10).returncode != 0:
        pytest.skip("this machine does not allow network namespaces")
    subprocess.run(["ip", "netns", "del", probe], check=True, timeout=10)
    script = tmp_path / "rank.py"
    script.write_text(RANK_SCRIPT)
    return [LAUNCH / "two_hosts.sh", script]


def test_two_hosts_meet(two_hosts: list[str | Path]) -> None:
    done = run_command(two_hosts, timeout_s=120, env={"PYTHON": sys.executable, "LIMIT_S": "90"})
    assert "at 10.77.0.1/24 sum 3.0" in done.output
    assert "at 10.77.0.2/24 sum 3.0" in done.output


def test_a_failing_host_ends_both_and_leaves_nothing(two_hosts: list[str | Path]) -> None:
    before = _namespaces()
    environment = {"PYTHON": sys.executable, "LIMIT_S": "90"}
    done = run_command([*two_hosts, "fail"], timeout_s=120, env=environment, check=False)
    assert done.returncode not in (0, 124), done.output
    assert _namespaces() <= before


def test_two_hosts_are_bounded(two_hosts: list[str | Path], tmp_path: Path) -> None:
    endless = tmp_path / "endless.py"
    endless.write_text("import time; time.sleep(600)")
    environment = {"PYTHON": sys.executable, "LIMIT_S": "8"}
    done = run_command([two_hosts[0], endless], timeout_s=90, env=environment, check=False)
    assert done.returncode == 124, done.output
    assert "stopped after 8 s" in done.output


def test_slurm_script_starts_one_torchrun_a_node(tmp_path: Path) -> None:
    fakes = {
        "scontrol": "echo node7; echo node8",
        "srun": 'shift; for SLURM_NODEID in 0 1; do export SLURM_NODEID; "$@"; done',
        "recorder": 'echo "$@"',
    }
    for name, body in fakes.items():
        path = tmp_path / name
        path.write_text(f"#!/usr/bin/env bash\n{body}\n")
        path.chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHON": str(tmp_path / "recorder"),
        "SLURM_JOB_NODELIST": "node[7-8]",
        "SLURM_JOB_ID": "123",
        "SLURM_NNODES": "2",
        "SLURM_GPUS_ON_NODE": "8",
        "SLURM_SUBMIT_DIR": str(REPOSITORY),
    }
    done = run_command([LAUNCH / "slurm.sbatch", "some.yaml", "run.steps=3"], timeout_s=30, env=environment)
    lines = done.output.strip().splitlines()
    assert len(lines) == 2
    for rank, line in enumerate(lines):
        expected = f"--nnodes 2 --node-rank {rank} --nproc-per-node 8 --master-addr node7 --master-port 20123"
        assert expected in line
        assert line.endswith("-m grpo_mc train some.yaml run.steps=3")
