"""The benchmark over slow links: its rows and the rate of the links, and that nothing of it stays, however it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import throttled_hosts
from helpers.processes import REPOSITORY, run_command

pytestmark = pytest.mark.dist

PROGRAM = [sys.executable, REPOSITORY / "benchmarks/compressed_reduce_scatter.py"]
SLOW = 20
"""Mbit/s: so slow that a busy machine does not show in the seconds."""


@pytest.fixture
def hosts() -> None:
    """Skips where hosts cannot be made."""
    try:
        with throttled_hosts.throttled_hosts(1, SLOW):
            pass
    except throttled_hosts.HostsUnavailable as reason:
        pytest.skip(str(reason))


def namespaces_of(pid: int) -> list[str]:
    return [name for name in throttled_hosts._existing() if name.startswith(f"throttled-{pid}-")]


def ranks_of(pid: int) -> list[int]:
    """The processes that `pid` started, also when it is gone: by the variable it gave them."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"PARENT_PID={pid}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def test_rows_of_a_slow_link(hosts: None) -> None:
    """The ratio that is wanted at 1 Gbit/s; there the processors count for more than at this rate."""
    entries, ranks = 1 << 20, 2
    small = ["--entries", str(entries), "--ranks", str(ranks), "--mbit-per-s", str(SLOW), "--rounds", "1", "--json"]
    done = run_command([*PROGRAM, *small], timeout_s=240)
    rows = {row["baseline_name"]: row for row in map(json.loads, done.output.splitlines())}
    assert set(rows) == {"gloo reduce_scatter_tensor", "float32 all-to-all, then added up"}
    for row in rows.values():
        assert row["op"] == "compressed_reduce_scatter" and row["threads"] == 1 and row["dtype"] == "float32"
        assert row["shape"] == {"n": entries, "ranks": ranks, "bits": 4, "mbit_per_s": SLOW}
        assert row["ratio"] == pytest.approx(row["baseline_seconds"] / row["seconds"]) and row["ratio"] >= 3
        assert 0 < row["rel_error"] < 0.12
        assert row["message_bytes"] == entries // ranks // 128 * (64 + 4)
        assert row["message_bytes"] < row["wire_bytes"] < 1.05 * row["message_bytes"]
        assert row["baseline_wire_bytes"] >= 7.4 * row["wire_bytes"]
        rate = 8 * (row["baseline_wire_bytes"] - throttled_hosts.BURST_BYTES) / row["baseline_seconds"]
        assert rate <= 1.02e6 * SLOW, "the link is not throttled"
        assert min(row["quantise_s"], row["transfer_s"], row["sum_s"], row["gbps"], row["peak_bytes"] or 1) >= 0
    assert not throttled_hosts._existing()


def test_without_the_program_ip_it_says_what_to_install(tmp_path: Path) -> None:
    arguments = ["--entries", "128", "--ranks", "2", "--mbit-per-s", "1000", "0", "--rounds", "1", "--json"]
    done = run_command([*PROGRAM, *arguments], timeout_s=120, env={"PATH": str(tmp_path)})
    skipped, *rows = done.output.splitlines()
    assert skipped == (
        "compressed_reduce_scatter: skipped, 2 ranks at 1000 Mbit/s: the program ip and tc is missing; run: apt-get"
        " install iproute2"
    )
    assert [json.loads(row)["shape"] for row in rows] == [{"n": 128, "ranks": 2, "bits": 4}] * 2  # the loopback's
    assert all(json.loads(row)["wire_bytes"] is None for row in rows)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_benchmark_that_is_ended_leaves_nothing(hosts: None, how: signal.Signals) -> None:
    """What SIGKILL leaves is removed when hosts are made the next time; its ranks end with it."""
    arguments = ["--entries", "1048576", "--ranks", "2", "--mbit-per-s", "1", "--rounds", "99"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen(
        [*PROGRAM, *arguments], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 60
        while len(ranks_of(process.pid)) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert len(namespaces_of(process.pid)) == 3
        time.sleep(1.0)  # a rank asks the kernel to end with its parent as the first thing it does
    finally:
        process.send_signal(how)
        status = process.wait(60)
    assert status == (143 if how == signal.SIGTERM else -signal.SIGKILL)
    deadline = time.monotonic() + 30
    while ranks_of(process.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not ranks_of(process.pid)
    assert len(namespaces_of(process.pid)) == (0 if how == signal.SIGTERM else 3)
    with throttled_hosts.throttled_hosts(1, SLOW):
        assert not namespaces_of(process.pid)
    assert not namespaces_of(os.getpid())


def test_mistakes_are_named() -> None:
    for arguments, message in (
        (["--entries", "7"], "--entries is 7; gloo needs a multiple of the 2 ranks"),
        (["--ranks", "1"], "--ranks must be at least 2"),
    ):
        done = run_command([*PROGRAM, *arguments], timeout_s=60, check=False)
        assert done.returncode == 2 and message in done.output
