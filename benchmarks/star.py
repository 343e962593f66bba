"""A network of shaped links: every node in a network namespace of its own, behind a link to one switch.

Needs root, `ip` and `tc`. Each link carries so many Mbit/s in either direction (token buckets of 128 KiB), so
nodes behave like machines with a slow network card; what the link of a node has carried is counted by the
kernel, with all headers.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from .arguments import BenchError

PREFIX = "198.18.78"  # of the block that is set aside for benchmarks
BURST = "128kb"
LATENCY = "400ms"


def check_network() -> None:
    """Raise `BenchError` where no such network can be made."""
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        raise BenchError(f"{', '.join(missing)}: not found; they come with the package iproute2")
    if os.geteuid() != 0:
        raise BenchError("network namespaces and shaped links need root: run it with sudo")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise BenchError(f"{' '.join(command)}: {done.stderr.strip()}")


class Star:
    """A context manager."""

    def __init__(self, nodes: Sequence[str], mbit: float | None) -> None:
        """nodes: names. mbit: Mbit/s of each link, in each direction; 0 or None for as fast as it goes."""
        self._nodes = list(nodes)
        self._mbit = mbit
        self._id = os.getpid() % 10**6
        self._bridge = f"gw{self._id}"
        self._counters: dict[str, tuple[int, int]] = {}  # by node, open files of bytes sent and received

    def address(self, node: str) -> str:
        return f"{PREFIX}.{self._nodes.index(node) + 2}"

    def prefix(self, node: str) -> tuple[str, ...]:
        """What to start a command with, so that it runs on the node."""
        return ("ip", "netns", "exec", self._space(node))

    def carried(self, node: str) -> tuple[int, int]:
        """Bytes that have come to the node, and from it."""
        if node not in self._counters:
            statistics = Path(f"/sys/class/net/{self._link(node)}/statistics")
            sent, received = (os.open(statistics / name, os.O_RDONLY) for name in ("tx_bytes", "rx_bytes"))
            self._counters[node] = sent, received
        # They are read hundreds of times a second, beside what is measured.
        sent, received = (int(os.pread(file, 32, 0)) for file in self._counters[node])
        return sent, received

    def processes(self, node: str) -> list[int]:
        """Process ids of what runs on the node."""
        done = subprocess.run(["ip", "netns", "pids", self._space(node)], capture_output=True, text=True)
        return [int(line) for line in done.stdout.split()]

    def _space(self, node: str) -> str:
        return f"gradwire-{self._id}-{node}"

    def _link(self, node: str) -> str:
        return f"gw{self._id}n{self._nodes.index(node)}"

    def __enter__(self) -> Self:
        taken = subprocess.run(["ip", "address", "show", "to", f"{PREFIX}.1"], capture_output=True, text=True)
        if taken.stdout:
            where = taken.stdout.split(":")[1].strip()
            raise BenchError(
                f"{PREFIX}.1 is the address of {where}: another benchmark runs, or was killed; then remove "
                f"what it left: ip link delete {where}, and ip netns delete for what ip netns list shows"
            )
        try:
            _run("ip", "link", "add", self._bridge, "type", "bridge")
            _run("ip", "address", "add", f"{PREFIX}.1/24", "dev", self._bridge)
            _run("ip", "link", "set", self._bridge, "up")
            for node in self._nodes:
                self._attach(node)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _attach(self, node: str) -> None:
        space, link = self._space(node), self._link(node)
        _run("ip", "netns", "add", space)
        _run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", space)
        _run("ip", "link", "set", link, "master", self._bridge, "up")
        _run("ip", "-n", space, "link", "set", "lo", "up")
        _run("ip", "-n", space, "address", "add", f"{self.address(node)}/24", "dev", "eth0")
        _run("ip", "-n", space, "link", "set", "eth0", "up")
        if not self._mbit:
            return
        shape = ("root", "tbf", "rate", f"{self._mbit:g}mbit", "burst", BURST, "latency", LATENCY)
        _run("tc", "qdisc", "add", "dev", link, *shape)
        _run("ip", "netns", "exec", space, "tc", "qdisc", "add", "dev", "eth0", *shape)

    def __exit__(self, *error: object) -> None:
        for file in itertools.chain.from_iterable(self._counters.values()):
            os.close(file)
        self._counters.clear()
        for node in self._nodes:
            # A namespace takes its end of the link along some time later: the next star has the same names.
            subprocess.run(["ip", "link", "delete", self._link(node)], capture_output=True)
            subprocess.run(["ip", "netns", "delete", self._space(node)], capture_output=True)
        subprocess.run(["ip", "link", "delete", self._bridge], capture_output=True)
