"""A benchmark's network goes with it, however it ends, and one that was left does not stand in the way."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gradwire.common.exits import Exit

PROGRAM = Path(__file__).parent / "programs" / "standing_star.py"
# To remove links and namespaces takes a loaded machine long: the kernel does it after grace periods.
SECONDS = 240


def may_make_one() -> bool:
    return os.geteuid() == 0 and all(map(shutil.which, ("ip", "tc", "unshare", "nsenter")))


pytestmark = pytest.mark.skipif(not may_make_one(), reason="needs root, ip, tc and unshare")


class Machine:
    """Network and mount namespaces of their own, in which no other benchmark is, and names are free."""

    def __init__(self) -> None:
        hold = "mount -t tmpfs none /run && mkdir /run/netns && echo ready && exec cat"
        self._benches: list[subprocess.Popen[str]] = []
        self._holder = subprocess.Popen(
            ["unshare", "--net", "--mount", "sh", "-c", hold],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == "ready\n"
        self._enter = ["nsenter", f"--target={self._holder.pid}", "--net", "--mount"]

    def run(self, *command: str) -> str:
        return subprocess.run([*self._enter, *command], capture_output=True, text=True, check=True).stdout

    def networks(self) -> list[str]:
        """Names of links and namespaces that benchmarks have."""
        links = self.run("ip", "-brief", "link", "show").splitlines()
        return [
            line
            for line in (*links, *self.run("ip", "netns", "list").splitlines())
            if line[:2] in ("gw", "gr")
        ]

    def begin(self) -> subprocess.Popen[str]:
        """A benchmark, once its network stands. It is its process that is returned: nsenter becomes it."""
        bench = self.start()
        assert bench.stdout is not None
        assert bench.stdout.readline() == "standing\n"
        return bench

    def start(self) -> subprocess.Popen[str]:
        command = [*self._enter, sys.executable, str(PROGRAM)]
        bench = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self._benches.append(bench)
        return bench

    def close(self) -> None:
        for bench in self._benches:  # whatever has become of them
            bench.kill()
            with bench:
                pass
        self._holder.communicate()


@pytest.fixture
def machine() -> Iterator[Machine]:
    found = Machine()
    yield found
    found.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_leaves_nothing(number: signal.Signals, machine: Machine) -> None:
    bench = machine.begin()
    assert len(machine.networks()) == 5, "a bridge, two links and two namespaces"
    bench.send_signal(number)
    bench.send_signal(number)  # does not interrupt the clearing up
    _, errors = bench.communicate(timeout=SECONDS)

    assert (bench.returncode, errors) == (128 + number, "")
    assert machine.networks() == []


def test_what_a_killed_one_left_is_removed_at_the_next_start_and_nothing_of_a_live_one(
    machine: Machine,
) -> None:
    killed = machine.begin()
    killed.kill()
    killed.communicate()
    left = machine.networks()
    assert len(left) == 5

    live = machine.begin()
    assert not set(left) & set(machine.networks())
    standing = machine.networks()
    other = machine.start()
    _, errors = other.communicate(timeout=SECONDS)
    assert other.returncode == Exit.USAGE
    assert "another benchmark uses its network on this machine" in errors
    assert machine.networks() == standing
    live.terminate()
    _, errors = live.communicate(timeout=SECONDS)
    assert "removed networks that a killed benchmark had left: gw" in errors
    assert f"gradwire-{killed.pid}-worker-0" in errors
    assert machine.networks() == []


def test_links_of_others_survive_whatever_their_names(machine: Machine) -> None:
    """A WireGuard interface or a bridge may be called gw0. Here it has a port, which stays in it."""
    machine.run("ip", "link", "add", "gw0", "type", "bridge")
    machine.run("ip", "link", "add", "gw1n0", "up", "master", "gw0", "type", "veth", "peer", "name", "gw12")
    bench = machine.begin()
    bench.terminate()
    _, errors = bench.communicate(timeout=SECONDS)
    assert errors == "", "nothing was left by a benchmark, and nothing is said to be"
    assert sorted(line.split()[0] for line in machine.networks()) == ["gw0", "gw12@gw1n0", "gw1n0@gw12"]
    assert "gw1n0" in machine.run("ip", "-brief", "link", "show", "master", "gw0")
