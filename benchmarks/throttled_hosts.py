"""Hosts on one machine whose network links are as slow as you say: network namespaces, virtual cables, token buckets.

Every host is a network namespace with eth0, address 10.78.0.1 and on, plugged into one switch (a bridge in a namespace
of its own). tc's token bucket filter (tbf) holds both ends of each cable to the rate: what a host sends as well as what
it receives. It needs root and Linux's iproute2.

Everything is made inside the namespaces, so that removing them removes everything. Their names carry the process that
made them; those of a process that was killed before it could clean up are removed when hosts are made the next time.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

INTERFACE = "eth0"
"""The hosts' network interface."""
BURST_BYTES = 128 * 1024
"""What a link that was idle may send at once: 1 ms at 1 Gbit/s, and more than the largest packet (64 KiB)."""
QUEUE_MS = 50
"""Longest wait of a packet in front of a link; what would wait longer is dropped, as by a switch."""
NAME = re.compile(r"throttled-(?P<pid>\d+)-(?P<start>\d+)-\w+")


class HostsUnavailable(Exception):
    """This machine cannot make them; the text says why and what to change."""


class Hosts:
    """Hosts that are there; see throttled_hosts."""

    def __init__(self, names: list[str]) -> None:
        self._names = names

    def command(self, host: int) -> list[str]:
        """What to put before a command line to run it on a host."""
        return ["ip", "netns", "exec", self._names[host]]

    @staticmethod
    def address(host: int) -> str:
        """The address of a host's eth0."""
        return f"10.78.0.{host + 1}"


@contextmanager
def throttled_hosts(count: int, mbit_per_s: int) -> Iterator[Hosts]:
    """Hosts while the block runs; what runs on them after it, also when it ends by an exception, is ended.

    Args:
        count: Hosts, 1 to 200.
        mbit_per_s: Rate of every link in each direction.

    Raises:
        HostsUnavailable: no root, no iproute2, or a kernel that refuses.
    """
    _check_machine()
    for name in _existing():
        if _is_stale(name):
            _remove(name)
    names = [f"throttled-{os.getpid()}-{_start_time(os.getpid())}-{part}" for part in (*range(count), "switch")]
    try:
        _build(names[:-1], names[-1], mbit_per_s)
        yield Hosts(names[:-1])
    finally:
        for name in set(names) & set(_existing()):
            _remove(name)


def _check_machine() -> None:
    missing = [program for program in ("ip", "tc") if shutil.which(program) is None]
    if missing:
        raise HostsUnavailable(f"the program {' and '.join(missing)} is missing; run: apt-get install iproute2")
    if os.geteuid() != 0:
        raise HostsUnavailable("network namespaces need root; run it again with sudo")


def _build(hosts: list[str], switch: str, mbit_per_s: int) -> None:
    bucket = f"root tbf rate {mbit_per_s}mbit burst {BURST_BYTES} latency {QUEUE_MS}ms"
    for name in (*hosts, switch):
        _do(f"ip netns add {name}")
    _do(f"ip -n {switch} link add bridge0 type bridge")
    _do(f"ip -n {switch} link set bridge0 up")
    for number, host in enumerate(hosts):
        port = f"port{number}"
        _do(f"ip -n {switch} link add {port} type veth peer name {INTERFACE} netns {host}")
        _do(f"tc -n {host} qdisc add dev {INTERFACE} {bucket}")
        _do(f"tc -n {switch} qdisc add dev {port} {bucket}")
        _do(f"ip -n {host} addr add {Hosts.address(number)}/24 dev {INTERFACE}")
        _do(f"ip -n {host} link set lo up")
        _do(f"ip -n {host} link set {INTERFACE} up")
        _do(f"ip -n {switch} link set {port} master bridge0 up")


def _do(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        text = (done.stderr or done.stdout).strip()
        raise HostsUnavailable(f"`{command}` failed here ({text}); run it where the kernel allows it, not in a sandbox")


def _existing() -> list[str]:
    """The namespaces of this module, whoever made them."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, timeout=60).stdout
    return [line.split()[0] for line in listed.splitlines() if NAME.fullmatch(line.split()[0])]


def _is_stale(name: str) -> bool:
    """Whether the process that made it is gone; a new process with its number began at another time."""
    made = NAME.fullmatch(name)
    assert made is not None
    return _start_time(int(made["pid"])) != int(made["start"])


def _start_time(pid: int) -> int | None:
    """When a process began, in clock ticks since the machine did; None when it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(stat.rpartition(")")[2].split()[19])  # field 22; the program's name before it may hold anything


def _remove(name: str) -> None:
    """Ends what runs in a namespace, and removes it and its cables."""
    listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, timeout=60).stdout
    for pid in map(int, listed.split()):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=60)
