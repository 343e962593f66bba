"""A network of shaped links: every node in a network namespace of its own, behind a link to one switch.

Needs root, `ip` and `tc`. Each link has a limited rate in both directions (token buckets of 128 KiB), so
nodes behave like machines with a slow network card. The kernel counts the bytes on each link, with all
headers.

Only one such network may exist at a time. Its process holds `MARK`, a name that the kernel frees when the
process ends, also by a signal. A process that gets the mark therefore knows that every other network was left
by a process that was killed, and removes it.
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

# An abstract socket: its name is valid in one network namespace, like the names of links.
MARK = "\0gradwire-benchmark-network"
PREFIX = "198.18.78"  # addresses from the block that is reserved for benchmarks
BRIDGE = "gwbench"  # prefix of the bridges' names, unique on a machine
BURST = "128kb"
LATENCY = "400ms"


def check_network() -> None:
    """Raise `BenchError` unless this process can make a network: it needs `ip`, `tc` and root."""
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        raise BenchError(f"{', '.join(missing)}: not found; install the package iproute2")
    if os.geteuid() != 0:
        raise BenchError("network namespaces and shaped links need root: run it with sudo")


def _run(*command: str) -> None:
    """Run a command. Raises BenchError with its standard error if it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise BenchError(f"{' '.join(command)}: {done.stderr.strip()}")


class Star:
    """A context in which the network exists. Programs run on its nodes under the commands of `prefix`."""

    def __init__(self, nodes: Sequence[str], mbit: float | None) -> None:
        """Args:
        nodes: names of the nodes.
        mbit: Mbit/s of each link in each direction; 0 or None for no limit.
        """
        self._nodes = list(nodes)
        self._mbit = mbit
        self._id = os.getpid()
        self._bridge = f"{BRIDGE}{self._id}"  # a name has at most 15 characters, an id 7
        self._mark: socket.socket | None = None
        self._counters: dict[str, tuple[int, int]] = {}  # by node, descriptors of its two byte counters

    def address(self, node: str) -> str:
        """Return the IP address of a node."""
        return f"{PREFIX}.{self._nodes.index(node) + 2}"

    def prefix(self, node: str) -> tuple[str, ...]:
        """Return the command that runs another command, appended to it, on the node."""
        return ("ip", "netns", "exec", self._namespace(node))

    def carried(self, node: str) -> tuple[int, int]:
        """Return the bytes that the node has received and sent so far."""
        if node not in self._counters:
            statistics = Path(f"/sys/class/net/{self._link(node)}/statistics")
            sent, received = (os.open(statistics / name, os.O_RDONLY) for name in ("tx_bytes", "rx_bytes"))
            self._counters[node] = sent, received
        # The files stay open: they are read hundreds of times a second, while the measured programs run.
        sent, received = (int(os.pread(file, 32, 0)) for file in self._counters[node])
        return sent, received

    def processes(self, node: str) -> list[int]:
        """Return the ids of the processes that run on the node."""
        done = subprocess.run(["ip", "netns", "pids", self._namespace(node)], capture_output=True, text=True)
        return [int(line) for line in done.stdout.split()]

    def _namespace(self, node: str) -> str:
        return f"gradwire-{self._id}-{node}"

    def _link(self, node: str) -> str:
        return f"gw{self._id}n{self._nodes.index(node)}"

    def __enter__(self) -> Self:
        self._mark = _claim_mark()
        try:
            if left := remove_networks():
                output.say(f"removed networks that a killed benchmark had left: {', '.join(left)}")
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
        """Make a node: its namespace, and its link to the switch."""
        space, link = self._namespace(node), self._link(node)
        _run("ip", "netns", "add", space)
        # A port of the bridge from its creation on, because `remove_networks` finds links by their bridge.
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
            with Interrupt() as interrupt:  # a signal has to wait until the network is removed
                remove_networks()
                self._mark.close()
            interrupt.pause(0)


def _claim_mark() -> socket.socket:
    """Return the socket that holds the mark until it is closed.

    Raises:
        BenchError: if another process holds the mark.
    """
    mark = socket.socket(socket.AF_UNIX)
    try:
        mark.bind(MARK)
    except OSError:
        mark.close()
        raise BenchError(
            "another benchmark uses its network on this machine, where only one may exist; wait for it to "
            "end, or stop it"
        ) from None
    return mark


def remove_networks() -> list[str]:
    """Remove the benchmarks' bridges, their ports and their namespaces, and return the names of all these.

    Call it only while holding the mark. Links of other bridges stay even if their names are alike: `gw0` may
    be a user's WireGuard interface.
    """
    bridges = _names(rf"\d+: ({BRIDGE}\d+):", "ip", "-o", "link", "show", "type", "bridge")
    ports = [
        port
        for bridge in bridges
        for port in _names(r"\d+: ([^@:]+)[@:]", "ip", "-o", "link", "show", "master", bridge)
    ]
    links = [*ports, *bridges]
    spaces = _names(r"(gradwire-\d+-\S+)", "ip", "netns", "list")
    # Links first: a removed namespace removes its end of a link only some time later.
    for link in links:
        subprocess.run(["ip", "link", "delete", link], capture_output=True)
    for space in spaces:
        subprocess.run(["ip", "netns", "delete", space], capture_output=True)
    return [*links, *spaces]


def _names(pattern: str, *command: str) -> list[str]:
    """Run a command and return the pattern's first group for each line of output that begins with a match."""
    lines = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    return [found[1] for line in lines if (found := re.match(pattern, line))]
