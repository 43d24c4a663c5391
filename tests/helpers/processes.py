"""Start real processes from a test, with a bound on every wait.

`run_distributed(fn, nproc, *args)` runs `fn(*args)` in `nproc` processes with the environment torchrun would give them,
inside a gloo process group, and returns what each rank returned. `run_command` runs one command line (a torchrun
launch, say). Both put what they start into process groups of their own, mark it with an environment variable, and on
a timeout or failure end everything that carries the mark, also grandchildren that changed their session.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

REPOSITORY = Path(__file__).resolve().parents[2]
RANK_MAIN = Path(__file__).with_name("rank_main.py")
MARK = "GRPO_MC_TEST_MARK"
OUTPUT_TAIL = 6000
"""Characters of a process's output shown in a failure."""


class ProcessFailure(AssertionError):
    """A started process failed or ran out of time; the message holds the output of each."""


@dataclass(frozen=True)
class Finished:
    """A command that ended: its exit status and its stdout and stderr together."""

    returncode: int
    output: str


def free_port() -> int:
    """A TCP port of localhost that was free a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def marked_environment(mark: str, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of started processes: one thread each, this checkout importable, no network look-ups."""
    environment = dict(os.environ)
    environment.setdefault("OMP_NUM_THREADS", "1")
    environment["HF_HUB_OFFLINE"] = "1"
    environment["GLOO_SOCKET_IFNAME"] = environment.get("GLOO_SOCKET_IFNAME", "lo")
    paths = [str(REPOSITORY), str(REPOSITORY / "tests"), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(p for p in paths if p)
    environment[MARK] = mark
    environment.update(extra or {})
    return environment


def kill_marked(mark: str, patience_s: float = 5.0) -> int:
    """Ends every process whose environment carries `mark`; returns how many it found."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(MARK) == mark:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    for process in found:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(found, timeout=patience_s)
    return len(found)


def run_command(
    command: Sequence[str | Path],
    *,
    timeout_s: float = 120.0,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    check: bool = True,
) -> Finished:
    """Runs one command; raises ProcessFailure on a timeout, and on a non-zero status unless `check` is False."""
    mark = uuid.uuid4().hex
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=marked_environment(mark, env),
            cwd=cwd,
            start_new_session=True,
        )
        try:
            returncode: int | None = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            returncode = None
        finally:
            kill_marked(mark)
            process.wait()
        log.seek(0)
        output = log.read()
    shown = " ".join(str(part) for part in command)
    if returncode is None:
        raise ProcessFailure(f"still running after {timeout_s} s: {shown}\n{output[-OUTPUT_TAIL:]}")
    if check and returncode != 0:
        raise ProcessFailure(f"exit status {returncode}: {shown}\n{output[-OUTPUT_TAIL:]}")
    return Finished(returncode, output)


def torchrun(
    arguments: Sequence[str | Path],
    nproc: int,
    *,
    timeout_s: float = 180.0,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    check: bool = True,
) -> Finished:
    """`torchrun --nproc-per-node nproc arguments`, with each line of output prefixed by its rank."""
    with tempfile.TemporaryDirectory() as logs:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", str(nproc)]
        rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--log-dir", logs]
        command = [*launcher, *rendezvous, "--tee", "3", *arguments]
        return run_command(command, timeout_s=timeout_s, env=env, cwd=cwd, check=check)


def run_distributed(
    fn: Callable[..., Any],
    nproc: int,
    *args: Any,
    timeout_s: float = 120.0,
    env: Mapping[str, str] | None = None,
    init: bool = True,
) -> list[Any]:
    """Runs `fn(*args)` in `nproc` processes and returns what each rank returned.

    Args:
        fn: a function at the top level of a file (a test module will do; the file is loaded by its path in each rank).
            It reads its place from torch.distributed.
        args: picklable arguments.
        timeout_s: bound of the whole run.
        env: more environment variables.
        init: start the gloo process group before `fn` and destroy it after; False leaves that to `fn`
            (MASTER_ADDR, MASTER_PORT, RANK, LOCAL_RANK, WORLD_SIZE are set).

    Returns: [nproc] results by rank.

    Raises:
        ProcessFailure: a rank failed or time ran out; the message holds each rank's output.
        RuntimeError: called while a rank loads `fn`'s file: without a main guard ranks would start ranks without end.
    """
    if MARK in os.environ and "RANK" in os.environ:
        raise RuntimeError(
            f"run_distributed({fn.__name__}): called inside a rank; call it under if __name__ == '__main__'"
        )
    source = Path(sys.modules[fn.__module__].__file__ or "").resolve()
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        call = {
            "file": str(source),
            "module": fn.__module__,
            "function": fn.__name__,
            "args": args,
            "init": init,
            "timeout_s": timeout_s,
        }
        (folder / "call.pickle").write_bytes(pickle.dumps(call))
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(nproc)}
        shared |= {"LOCAL_WORLD_SIZE": str(nproc)} | dict(env or {})
        processes = []
        try:
            for rank in range(nproc):
                environment = marked_environment(mark, shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
                with open(folder / f"rank{rank}.log", "w") as log:
                    command = [sys.executable, str(RANK_MAIN), str(folder)]
                    processes.append(
                        subprocess.Popen(
                            command,
                            stdin=subprocess.DEVNULL,
                            stdout=log,
                            stderr=subprocess.STDOUT,
                            env=environment,
                            start_new_session=True,
                        )
                    )
            problem = _wait_all(processes, timeout_s)
        finally:
            kill_marked(mark)
            for process in processes:
                process.wait()
        if problem:
            raise ProcessFailure(_failure_message(fn, problem, processes, folder))
        return [pickle.loads((folder / f"rank{rank}.result").read_bytes()) for rank in range(nproc)]


def _wait_all(processes: list[subprocess.Popen[bytes]], timeout_s: float) -> str:
    """Waits until all ended well (returns ""), or one failed or time ran out (returns what happened)."""
    deadline = time.monotonic() + timeout_s
    while True:
        codes = [process.poll() for process in processes]
        failed = [rank for rank, code in enumerate(codes) if code not in (None, 0)]
        if failed:
            time.sleep(0.5)  # let the others write the tail of their logs
            return f"rank {failed[0]} ended with status {codes[failed[0]]}"
        if all(code == 0 for code in codes):
            return ""
        if time.monotonic() > deadline:
            running = [rank for rank, code in enumerate(codes) if code is None]
            for rank in running:  # rank_main prints every thread's stack on this signal
                processes[rank].send_signal(signal.SIGUSR1)
            time.sleep(0.5)
            return f"ranks {running} still running after {timeout_s} s"
        time.sleep(0.02)


def _failure_message(fn: Callable[..., Any], problem: str, processes: Sequence[Any], folder: Path) -> str:
    parts = [f"{fn.__name__} on {len(processes)} processes: {problem}"]
    for rank in range(len(processes)):
        text = (folder / f"rank{rank}.log").read_text(errors="replace")[-OUTPUT_TAIL:]
        parts.append(f"---- rank {rank} ----\n{text}")
    return "\n".join(parts)
