"""Child processes that end with their parent, each with a log file and a description of its end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

from ..common.exits import Exit

if TYPE_CHECKING:
    from ..proto.messages import StatusResponse

GRACE_SECONDS = 5.0  # between SIGTERM and SIGKILL
SHOWN_LOG_LINES = 8
WARNING = "WARNING "  # prefix of a log line that gc-run shows once the process has ended
PROGRESS = "PROGRESS "  # prefix of a log line that gc-run shows while the process runs


class RunError(Exception):
    """A run failed. The message is the reason.

    Attributes:
        code: exit code of gc-run for this reason.
        status: last status of the job; None if no version was made.
    """

    def __init__(self, code: Exit, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.status: StatusResponse | None = None


class Child:
    """A process that runs one module and ends with its parent.

    It has a session of its own, so that a terminal's Ctrl-C reaches only the parent.

    Attributes:
        name: name of the process in messages.
        log: file that receives its standard output and error.
    """

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        log: Path,
        prefix: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """Start the process, which runs `main` of a module with these arguments.

        `prefix` is a command to run it under, such as `nice`, which has to exec the rest of its command line.
        `environ` are its variables, by default those of this process.
        """
        self.name = name
        self.log = log
        self._lifeline, theirs = socket.socketpair()
        self._lifeline.setblocking(False)
        self._told = b""
        with log.open("wb") as output, theirs:
            # -P: modules in the working directory, which is the user's, must not shadow ours.
            self._process = subprocess.Popen(
                [*prefix, sys.executable, "-P", "-m", "gradwire.deploy.child", module, *arguments],
                stdin=theirs.fileno(),  # the lifeline: its end tells the child that the parent has ended
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environ,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def code(self) -> int | None:
        """The exit code, or minus the number of the signal that ended the process; None while it runs."""
        if self._process.returncode is None and os.waitid(
            os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT
        ):
            # End the processes that it started. A zombie keeps its id, so the process group is still its own.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        return self._process.poll()

    @property
    def ending(self) -> str:
        """The end of the process as text: `exit code 3 (refused)`, `SIGKILL` or `still running`."""
        code = self.code
        if code is None:
            return "still running"
        if code < 0:
            return signal.Signals(-code).name
        meaning = {int(known): f" ({known.name.lower()})" for known in Exit}.get(code, "")
        return f"exit code {code}{meaning}"

    def last_lines(self, count: int = SHOWN_LOG_LINES) -> str:
        """Return the last `count` lines of the process's log."""
        with self.log.open(encoding="utf-8", errors="replace") as lines:
            return "".join(deque(lines, maxlen=count)).rstrip()

    @property
    def ports(self) -> dict[str, int]:
        """Ports that the process has begun to listen on: `grpc` of a server, and `http`."""
        with contextlib.suppress(BlockingIOError, ConnectionResetError):
            while data := self._lifeline.recv(1024):
                self._told += data
        lines = self._told.decode().split("\n")[:-1]
        return {name: int(port) for name, port in map(str.split, lines)}

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process and its whole group, if the process still runs."""
        if self.code is None:
            os.killpg(self.pid, number)

    def close(self) -> None:
        """Close the socket that ends the child with its parent. Call it once the child has ended."""
        self._lifeline.close()
        self._process.wait()


class Children:
    """The processes of one run. Leaving its with block ends those that still run."""

    def __init__(self, directory: Path) -> None:
        """`directory` is for the logs, and made when the first process starts."""
        self._directory = directory
        self._all: list[Child] = []

    def start(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        prefix: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
    ) -> Child:
        """Start a process as `Child` does, with its log in `name`.log, and return it."""
        self._directory.mkdir(parents=True, exist_ok=True)
        child = Child(name, module, arguments, self._directory / f"{name}.log", prefix, environ)
        self._all.append(child)
        return child

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            for child in self._all:
                child.send(number)
            wait(self._all, seconds=GRACE_SECONDS)
        for child in self._all:
            child.close()


def wait(children: Sequence[Child], *, seconds: float) -> bool:
    """Wait until all processes have ended, for at most `seconds`; return True when all have ended."""
    deadline = time.monotonic() + seconds
    while any(child.code is None for child in children):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
