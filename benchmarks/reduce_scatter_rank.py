"""One rank of compressed_reduce_scatter.py: times the ways in turn and, on rank 0, prints a row for each baseline."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_mc.megatron.compressed_collectives import CompressedReduceScatter
from grpo_mc.megatron.wire_format import INT4, INT8
from grpo_mc.ops.bench import timing

OURS, GLOO, PLAIN = "ours", "gloo reduce_scatter_tensor", "float32 all-to-all, then added up"
SETTLE_S = 0.05
"""Until the last acknowledgements of a call have left too."""
PR_SET_PDEATHSIG = 1
"""From Linux's prctl.h."""


def end_with_parent() -> None:
    """Has the kernel end this process when the one that started it ends, however that ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ["PARENT_PID"]):
        raise SystemExit("the process that started this rank is gone")


def gradient(rank: int, entries: int) -> Tensor:
    """[entries] float32, normal, each rank's own."""
    return torch.randn(entries, generator=torch.Generator().manual_seed(rank))


def plain(whole: Tensor, part: Tensor, received: Tensor) -> Tensor:
    """What CompressedReduceScatter does, without quantising; received is [entries], for the messages."""
    dist.all_to_all_single(received, whole)
    return torch.sum(received.view(-1, len(part)), 0, out=part)


def gloo(whole: Tensor, part: Tensor) -> Tensor:
    dist.reduce_scatter_tensor(part, whole)
    return part


def seconds_of(call: Callable[[], Any]) -> float:
    """Of the slowest rank; all begin together."""
    dist.barrier()
    start = time.perf_counter()
    call()
    seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


class Phases:
    """When the messages of a call of ours were handed to gloo and when they were in, from inside its all-to-all."""

    def __init__(self) -> None:
        self.sent = self.arrived = 0.0
        self.message_bytes = 0
        self._original = dist.all_to_all_single

    def all_to_all_single(self, received: Tensor, message: Tensor, *splits: Any, **options: Any) -> Any:
        self.sent, self.message_bytes = time.perf_counter(), message.nbytes
        work = self._original(received, message, *splits, **options)
        phases = self

        class Waiting:
            def wait(self) -> None:
                work.wait()
                phases.arrived = time.perf_counter()

        return Waiting()


def phases_of(call: Callable[[], Any], rounds: int) -> dict[str, float]:
    """Medians of this rank; cpu_s is the processor's time for all but the messages, whatever else the machine does."""
    phases, found = Phases(), []
    with mock.patch.object(dist, "all_to_all_single", phases.all_to_all_single):
        for _ in range(rounds):
            dist.barrier()
            start, cpu = time.perf_counter(), time.thread_time()
            call()
            end, cpu = time.perf_counter(), time.thread_time() - cpu
            found.append((phases.sent - start, phases.arrived - phases.sent, end - phases.arrived, cpu))
    names = ("quantise_s", "transfer_s", "sum_s", "cpu_s")
    medians = (statistics.median(column) for column in zip(*found, strict=True))
    return {**dict(zip(names, medians, strict=True)), "message_bytes": phases.message_bytes}


def wire_bytes(call: Callable[[], Any]) -> int:
    """What leaves this rank's network interface in a call and a barrier; the interface must be this rank's alone."""
    counter = Path(f"/sys/class/net/{os.environ['GLOO_SOCKET_IFNAME']}/statistics/tx_bytes")
    dist.barrier()
    time.sleep(SETTLE_S)
    before = int(counter.read_text())
    call()
    dist.barrier()  # gloo is done with a message that it sends when the kernel has it
    time.sleep(SETTLE_S)
    return int(counter.read_text()) - before


def measure(task: dict[str, int]) -> list[dict[str, Any]]:
    """The rows; all ranks call together. The figures but the seconds are those of this rank."""
    rank, ranks, entries = dist.get_rank(), dist.get_world_size(), task["entries"]
    whole = gradient(rank, entries)
    scatter = CompressedReduceScatter(entries, dist.group.WORLD, INT4 if task["bits"] == 4 else INT8)
    first, last = scatter.bounds[rank]
    part, received = torch.empty(last - first), torch.empty(entries)  # as in DDP's buffer, the memory is there
    exact = torch.zeros(last - first, dtype=torch.float64)
    for one in range(ranks):
        exact += gradient(one, entries)[first:last]
    calls: dict[str, Callable[[], Tensor]] = {
        OURS: lambda: scatter.reduce_scatter(whole, out=part),
        GLOO: lambda: gloo(whole, part),
        PLAIN: lambda: plain(whole, part, received),
    }
    errors = {name: timing.relative_error([call()], [exact]) for name, call in calls.items()}  # the warm-up, too
    assert max(errors[GLOO], errors[PLAIN]) < 1e-6, errors
    del exact
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(task["rounds"]):
        for name in list(calls)[:: -1 if number % 2 else 1]:
            seconds[name].append(seconds_of(calls[name]))
    has_own_interface = bool(task["mbit_per_s"])
    wire = {name: wire_bytes(call) if has_own_interface else None for name, call in calls.items()}
    phases = phases_of(calls[OURS], task["rounds"])
    peak = timing.peak_bytes(lambda _: calls[OURS](), lambda: None)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    link = {"mbit_per_s": task["mbit_per_s"]} if has_own_interface else {}
    return [
        {
            "op": "compressed_reduce_scatter", "device": "cpu",
            "shape": {"n": entries, "ranks": ranks, "bits": task["bits"], **link}, "dtype": "float32",
            "threads": torch.get_num_threads(), "seconds": medians[OURS], "baseline_seconds": medians[name],
            "ratio": medians[name] / medians[OURS], "baseline_name": name,
            "gbps": round(whole.nbytes / medians[OURS] / 1e9, 2), "rel_error": errors[OURS], "peak_bytes": peak,
            "machine": timing.machine("cpu"), **phases, "wire_bytes": wire[OURS], "baseline_wire_bytes": wire[name],
        }
        for name in (GLOO, PLAIN)
    ]  # fmt: skip


def main() -> None:
    end_with_parent()
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    rows = measure(json.loads(sys.argv[1]))
    if dist.get_rank() == 0:
        for row in rows:
            print(json.dumps(row), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
