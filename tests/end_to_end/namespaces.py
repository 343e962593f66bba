"""A network namespace with a link to this one, for tests that run as root and lose packets for real."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Generator, Mapping, Sequence

NOBODY = "02:00:00:00:00:99"  # no interface has it
_numbers = itertools.count(1)


def available() -> bool:
    """Whether this process may make one, and the tools for it are here."""
    return os.geteuid() == 0 and all(map(shutil.which, ("ip", "tc")))


class Namespace:
    """host, guest: the addresses of this end of the link and of the other."""

    def __init__(self) -> None:
        number = (os.getpid() * 8 + next(_numbers)) % 60_000
        self._name = f"gw{number}"
        self._ends = {"down": f"gwh{number}", "up": f"gwg{number}"}  # whose queue holds what goes this way
        subnet = f"10.{200 + number // 256 % 50}.{number % 256}"
        self.host, self.guest = f"{subnet}.1", f"{subnet}.2"

    def begin(self) -> None:
        host, guest = self._ends["down"], self._ends["up"]
        _run("ip", "netns", "add", self._name)
        _run("ip", "link", "add", host, "type", "veth", "peer", "name", guest)
        _run("ip", "link", "set", guest, "netns", self._name)
        _run("ip", "address", "add", f"{self.host}/24", "dev", host)
        _run("ip", "link", "set", host, "up")
        self._inside("ip", "address", "add", f"{self.guest}/24", "dev", guest)
        self._inside("ip", "link", "set", guest, "up")
        self._inside("ip", "link", "set", "lo", "up")

    def end(self) -> None:
        for command in (("ip", "link", "del", self._ends["down"]), ("ip", "netns", "del", self._name)):
            subprocess.run(command, stderr=subprocess.DEVNULL)

    def drop(self, way: str) -> None:
        """Lose every packet that goes "up", which is out of the namespace, or "down"."""
        run, to = self._sender(way)
        run("ip", "neighbour", "replace", to, "lladdr", NOBODY, "dev", self._ends[way], "nud", "permanent")

    def heal(self) -> None:
        for way in self._ends:
            run, to = self._sender(way)
            run("ip", "neighbour", "del", to, "dev", self._ends[way])

    def narrow(self, rate: str) -> None:
        """Let through no more than this, as "1mbit", and lose what no queue of four packets holds."""
        for way, end in self._ends.items():
            run, _ = self._sender(way)
            run(
                "tc",
                "qdisc",
                "replace",
                "dev",
                end,
                "root",
                "tbf",
                *f"rate {rate} burst 3000 limit 6000".split(),
            )

    def _sender(self, way: str) -> tuple[Callable[..., None], str]:
        """Return a function that runs commands at the sending end of a direction, and the address of the
        other end."""
        return (self._inside, self.host) if way == "up" else (_run, self.guest)

    def start(
        self, module: str, arguments: Sequence[str], environ: Mapping[str, str], stderr: int
    ) -> subprocess.Popen[bytes]:
        """A process inside, as `forkserver.plain` starts one outside."""
        command = ["ip", "netns", "exec", self._name, sys.executable, "-m", module, *arguments]
        null = subprocess.DEVNULL
        return subprocess.Popen(command, stdin=null, stdout=null, stderr=stderr, env=environ)

    def _inside(self, *command: str) -> None:
        _run("ip", "netns", "exec", self._name, *command)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@contextlib.contextmanager
def namespace() -> Generator[Namespace]:
    made = Namespace()
    try:
        made.begin()
        yield made
    finally:
        made.end()
