"""A compressed reduce-scatter between hosts with slow links, against gloo's and against the same in float32.

python benchmarks/compressed_reduce_scatter.py [--json | --compare FILE]

Every rank is a host of throttled_hosts with a link of 1 Gbit/s each way. That needs root and iproute2; without, these
rows are left out and stderr says why. Then the same on this machine's loopback, where nothing is slow but the
processors, to show what quantising costs: of each call, the time to quantise, for the messages, and to add them up;
cpu_s is the calling thread's processor time in all of that, for machines that do other things beside.

Baselines: gloo's reduce_scatter_tensor of float32, which in torch 2.13 is an all-reduce of the whole tensor (each rank
sends 2 (n - 1) / n of it, twice what a reduce-scatter must; baseline_wire_bytes shows which it is); and a float32
all-to-all whose parts are then added up, which sends no more than it must.

The ways take turns; seconds are the slowest rank's, medians over the rounds. wire_bytes left the network interface of
one rank in one call, headers and all; message_bytes were handed to gloo. gbps is the float32 tensor's bytes by the
seconds. rel_error is that of the first call: what it leaves over goes into the later ones. The rows have the fields of
`grpo-mc bench --json` and those named here.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from throttled_hosts import INTERFACE, Hosts, HostsUnavailable, throttled_hosts

RANK_PROGRAM = Path(__file__).with_name("reduce_scatter_rank.py")
PORT = 29532
"""On the first host, where no other program is."""


def rows_of(ranks: int, mbit_per_s: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of one number of ranks on one kind of link (0 = loopback).

    Raises:
        HostsUnavailable: the hosts could not be made.
        SystemExit: a rank failed, or time ran out.
    """
    task = {"entries": options.entries, "bits": options.bits, "rounds": options.rounds, "mbit_per_s": mbit_per_s}
    program = [sys.executable, str(RANK_PROGRAM), json.dumps(task)]
    if mbit_per_s:
        place = {"MASTER_ADDR": Hosts.address(0), "MASTER_PORT": str(PORT), "GLOO_SOCKET_IFNAME": INTERFACE}
        with throttled_hosts(ranks, mbit_per_s) as hosts:
            return run_ranks([[*hosts.command(rank), *program] for rank in range(ranks)], place, options.timeout_s)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    return run_ranks([program] * ranks, place, options.timeout_s)


def run_ranks(commands: Sequence[Sequence[str]], place: dict[str, str], timeout_s: float) -> list[dict[str, Any]]:
    """Runs the ranks and returns the rows that rank 0 prints.

    Raises:
        SystemExit: one failed, with the end of what they wrote, or time ran out.
    """
    shared = {**os.environ, **place, "WORLD_SIZE": str(len(commands)), "OMP_NUM_THREADS": "1"}
    processes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryFile("w+") as rows, tempfile.TemporaryFile("w+") as log:
        try:
            for rank, command in enumerate(commands):
                env = {**shared, "RANK": str(rank), "PARENT_PID": str(os.getpid())}
                processes.append(subprocess.Popen(command, stdout=log if rank else rows, stderr=log, env=env))
            problem = _wait(processes, timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if problem:
            log.seek(0)
            raise SystemExit(f"compressed_reduce_scatter: {problem}\n{log.read()[-3000:]}")
        rows.seek(0)
        return [json.loads(line) for line in rows.read().splitlines() if line.startswith("{")]


def _wait(processes: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> str:
    """Until all ended well (returns ""), one failed or time ran out (returns what happened)."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code not in (None, 0):
                return f"rank {rank} ended with status {code}"
        if all(code == 0 for code in codes):
            return ""
        time.sleep(0.05)
    return f"ranks still running after {timeout_s} s; raise --timeout-s"


def describe(row: dict[str, Any]) -> str:
    """Readable lines of a row."""
    from grpo_mc.ops import bench

    parts = {"quantise": row["quantise_s"], "messages": row["transfer_s"], "add up": row["sum_s"]}
    text = "; ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in parts.items())
    text += f" (processor {row['cpu_s'] * 1e3:.1f} ms); sent {row['message_bytes'] / 1e6:.2f} MB"
    if row["wire_bytes"] is not None:
        wire, baseline = row["wire_bytes"], row["baseline_wire_bytes"]
        text += f", on the wire {wire / 1e6:.2f} MB against {baseline / 1e6:.2f} MB ({baseline / wire:.2f}x less)"
    return f"{bench.describe(row)}\n    {text}"


def report(options: argparse.Namespace) -> None:
    """Measures and prints all rows; links that cannot be made are left out with a line on stderr."""
    from grpo_mc.ops import bench

    earlier = bench.read_rows(options.compare) if options.compare is not None else {}
    for mbit_per_s in options.mbit_per_s:
        for ranks in options.ranks:
            try:
                rows = rows_of(ranks, mbit_per_s, options)
            except HostsUnavailable as reason:
                text = f"compressed_reduce_scatter: skipped, {ranks} ranks at {mbit_per_s} Mbit/s: {reason}"
                print(text, file=sys.stderr, flush=True)
                continue
            for row in rows:
                before = earlier.get(bench.key_of(row))
                if before is not None:
                    row["seconds_before"], row["ratio_before"] = before["seconds"], before["ratio"]
                print(json.dumps(row) if options.json else describe(row), flush=True)


@contextmanager
def sigterm_as_exit() -> Iterator[None]:
    """SIGTERM raises SystemExit while the block runs, so that what was made is removed."""

    def leave(*_: Any) -> None:
        raise SystemExit(143)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=1 << 24, help="of the tensor (16 Mi)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks (2 4)")
    parser.add_argument("--bits", type=int, choices=(4, 8), default=4, help="of an entry on the wire (4)")
    parser.add_argument("--mbit-per-s", type=int, nargs="+", default=[1000, 0], help="0 = loopback (1000 0)")
    parser.add_argument("--rounds", type=int, default=9, help="runs of each way (9)")
    parser.add_argument("--timeout-s", type=float, default=600.0, help="of one number of ranks on one link (600)")
    parser.add_argument("--json", action="store_true", help="one object a line")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="an earlier --json output")
    options = parser.parse_args()
    if min(options.ranks) < 2 or options.rounds < 1 or min(options.mbit_per_s) < 0:
        parser.error("--ranks must be at least 2, --rounds at least 1, --mbit-per-s at least 0")
    for ranks in options.ranks:
        if options.entries < 1 or options.entries % ranks:
            parser.error(f"--entries is {options.entries}; gloo needs a multiple of the {ranks} ranks")
    with sigterm_as_exit():
        report(options)


if __name__ == "__main__":
    main()
