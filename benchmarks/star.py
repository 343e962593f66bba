"""A network of shaped links: every node in a network namespace of its own, behind a link to one switch.

Needs root, `ip` and `tc`. Each link carries so many Mbit/s in either direction (token buckets of 128 KiB), so
nodes behave like machines with a slow network card; what the link of a node has carried is counted by the
kernel, with all headers.

One such network stands at a time. Its process holds `MARK`, a name that the kernel frees when the process
ends, in whatever way. So a process that gets the mark knows that every other network was left by one that was
killed, and removes it.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from ..deploy.interrupt import Interrupt
from . import output
from .arguments import BenchError

# An abstract socket: its name holds in one network namespace, as the names of links do.
MARK = "\0gradwire-benchmark-network"
PREFIX = "198.18.78"  # of the block that is set aside for benchmarks
BRIDGE = "gwbench"  # begins the names of bridges, and of nothing else on a machine
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
    """Context in which the network exists."""

    def __init__(self, nodes: Sequence[str], mbit: float | None) -> None:
        """nodes: names. mbit: Mbit/s of each link in each direction; 0 or None for no limit."""
        self._nodes = list(nodes)
        self._mbit = mbit
        self._id = os.getpid()
        self._bridge = f"{BRIDGE}{self._id}"  # a name has at most 15 characters, an id 7
        self._mark: socket.socket | None = None
        self._counters: dict[str, tuple[int, int]] = {}  # by node, open files of bytes sent and received

    def address(self, node: str) -> str:
        return f"{PREFIX}.{self._nodes.index(node) + 2}"

    def prefix(self, node: str) -> tuple[str, ...]:
        """Return the command that runs another command on the node."""
        return ("ip", "netns", "exec", self._space(node))

    def carried(self, node: str) -> tuple[int, int]:
        """Return the bytes that the node has received and sent."""
        if node not in self._counters:
            statistics = Path(f"/sys/class/net/{self._link(node)}/statistics")
            sent, received = (os.open(statistics / name, os.O_RDONLY) for name in ("tx_bytes", "rx_bytes"))
            self._counters[node] = sent, received
        # They are read hundreds of times a second, beside what is measured.
        sent, received = (int(os.pread(file, 32, 0)) for file in self._counters[node])
        return sent, received

    def processes(self, node: str) -> list[int]:
        """Return the ids of the processes on the node."""
        done = subprocess.run(["ip", "netns", "pids", self._space(node)], capture_output=True, text=True)
        return [int(line) for line in done.stdout.split()]

    def _space(self, node: str) -> str:
        return f"gradwire-{self._id}-{node}"

    def _link(self, node: str) -> str:
        return f"gw{self._id}n{self._nodes.index(node)}"

    def __enter__(self) -> Self:
        self._mark = _claim()
        try:
            if left := remove_networks():
                output.say(f"removed what a benchmark that was killed had left: {', '.join(left)}")
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
        # A port of the bridge from the beginning: `remove_networks` finds links by that.
        veth = ("type", "veth", "peer", "name", "eth0", "netns", space)
        _run("ip", "link", "add", link, "up", "master", self._bridge, *veth)
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
        if self._mark is not None:
            with Interrupt() as interrupt:  # a signal waits until nothing is left
                remove_networks()
                self._mark.close()
            interrupt.pause(0)


def _claim() -> socket.socket:
    """Return what holds the mark until it is closed. Raises BenchError while another process has it."""
    mark = socket.socket(socket.AF_UNIX)
    try:
        mark.bind(MARK)
    except OSError:
        mark.close()
        raise BenchError(
            "another benchmark has its network up on this machine, and there can be one at a time; wait for "
            "it to end, or stop it"
        ) from None
    return mark


def remove_networks() -> list[str]:
    """Remove the benchmarks' bridges, their ports and their namespaces, and return the names of all these.

    Only for the holder of the mark. Other links stay, whatever their names: `gw0` may be a user's WireGuard
    interface.
    """
    bridges = _names(rf"\d+: ({BRIDGE}\d+):", "ip", "-o", "link", "show", "type", "bridge")
    ports = [
        port
        for bridge in bridges
        for port in _names(r"\d+: ([^@:]+)[@:]", "ip", "-o", "link", "show", "master", bridge)
    ]
    links = [*ports, *bridges]
    spaces = _names(r"(gradwire-\d+-\S+)", "ip", "netns", "list")
    # Links first: a namespace takes its end of one along some time later.
    for link in links:
        subprocess.run(["ip", "link", "delete", link], capture_output=True)
    for space in spaces:
        subprocess.run(["ip", "netns", "delete", space], capture_output=True)
    return [*links, *spaces]


def _names(pattern: str, *command: str) -> list[str]:
    """Return all matches of the pattern at the beginning of lines."""
    lines = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    return [found[1] for line in lines if (found := re.match(pattern, line))]
