"""A process group of two real processes, with a bound on every wait: does gloo work on this machine?

The parent starts both, waits at most the bound, and ends what is left of them. The children meet over a free port of
the loopback address, sum a tensor and compare.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

_CHILD = """
import datetime, sys
import torch
import torch.distributed as dist
rank, port, seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2,
                        timeout=datetime.timedelta(seconds=seconds))
value = torch.full((4,), float(rank + 1))
dist.all_reduce(value)
dist.destroy_process_group()
sys.exit(0 if value.tolist() == [3.0] * 4 else f"sum is {value.tolist()}, not [3.0, 3.0, 3.0, 3.0]")
"""


def free_port() -> int:
    """A TCP port of the loopback address that was free a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def probe_process_group(timeout_s: float) -> tuple[str, float]:
    """Returns (what went wrong, "" if nothing; seconds it took). Takes at most about timeout_s + 5 seconds."""
    started = time.monotonic()
    port = free_port()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"):
        environment.pop(name, None)
    children = [
        subprocess.Popen(
            [sys.executable, "-c", _CHILD, str(rank), str(port), str(timeout_s)],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for rank in range(2)
    ]
    try:
        problems = [_outcome(child, started + timeout_s - time.monotonic()) for child in children]
    finally:
        for child in children:
            _end(child)
    return next((problem for problem in problems if problem), ""), time.monotonic() - started


def _outcome(child: subprocess.Popen[str], seconds_left: float) -> str:
    """What went wrong in a child; "" if nothing."""
    try:
        _, errors = child.communicate(timeout=max(0.1, seconds_left))
    except subprocess.TimeoutExpired:
        return "a gloo process group of two processes did not form within the bound"
    if child.returncode == 0:
        return ""
    lines = [line for line in errors.splitlines() if line.strip()]
    return lines[-1].strip() if lines else f"a process ended with status {child.returncode}"


def _end(child: subprocess.Popen[str]) -> None:
    if child.poll() is None:
        try:
            os.killpg(child.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    child.wait(timeout=5)
    if child.stderr is not None:
        child.stderr.close()
