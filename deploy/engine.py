"""Trains one job with real processes on this machine: a server and its workers, watched until they are done.

    start the server on a free port -> start the workers -> poll both kinds of news -> end everything

News are the ends of processes and the server's Status. A worker that dies is named, and the run goes on with
the others, as a real job would; it stops when the server dies, when no worker is left, or when a worker ends
for a reason that the others share: it was refused, misused, or the task raised.
"""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ..exits import Exit
from ..proto.messages import Phase, StatusReply
from .config import RunOptions
from .daemons import HOST, server_arguments, worker_arguments
from .interrupt import Interrupt
from .processes import Child, Children, wait
from .status import StatusClient

POLL_SECONDS = 0.2
START_SECONDS = 120.0  # for a server to answer; importing torch on a busy machine takes its time
LEAVE_SECONDS = 10.0  # for workers to end by themselves once the job is done
LAST_WORD_SECONDS = 2.0  # for the server to call the job done after the last worker has left
START_ATTEMPTS = 3

# Ends of a worker after which there is no point in going on without it.
FATAL = (Exit.USAGE, Exit.REFUSED, Exit.TASK)


class RunError(Exception):
    """A run that could not be finished: why, in words, and the exit code for it."""

    def __init__(self, code: Exit, message: str) -> None:
        super().__init__(message)
        self.code = code


class Watcher(Protocol):
    """Who is told how a run goes."""

    def update(self, status: StatusReply, alive: int) -> None:
        """The job's state, several times a second, and how many worker processes run."""
        ...

    def note(self, text: str) -> None:
        """Something that a person should read."""
        ...


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One run.

    directory: for the logs of its processes.
    server, worker: the modules that are run; other ones in tests.
    """

    options: RunOptions
    directory: Path
    server: str = "gradwire.server.cli"
    worker: str = "gradwire.worker.cli"


def train(plan: Plan, watcher: Watcher, interrupt: Interrupt) -> StatusReply:
    """Train the job to its end and return the server's last word on it.

    Returns, or raises, only once every process has ended.

    Raises:
        RunError: the run stopped before the job was done.
        Interrupted: a signal came.
    """
    with Children(plan.directory) as children:
        server, port = _start_server(plan, children, interrupt)
        with StatusClient(f"{HOST}:{port}") as client:
            workers = [
                children.start(f"worker-{rank}", plan.worker, worker_arguments(plan.options, port, rank))
                for rank in range(plan.options.workers)
            ]
            final = _supervise(server, workers, client, watcher, interrupt)
        wait(workers, seconds=LEAVE_SECONDS)
        return final


def run_to_end(child: Child, interrupt: Interrupt) -> None:
    """Wait for a process that ends by itself, ready to be interrupted."""
    while child.code is None:
        interrupt.pause(POLL_SECONDS / 4)


def _supervise(
    server: Child, workers: list[Child], client: StatusClient, watcher: Watcher, interrupt: Interrupt
) -> StatusReply:
    running = list(workers)
    deserted_at = float("inf")
    while True:
        interrupt.pause(POLL_SECONDS)
        # First who has ended, then the status: a job that was done before its last worker left says so.
        ended = [worker for worker in running if worker.code is not None]
        running = [worker for worker in running if worker not in ended]
        status = client.ask()
        if status is not None:
            watcher.update(status, len(running))
            if status.phase is Phase.FINISHED:
                return status
        if server.code is not None:
            raise RunError(Exit.INTERNAL, _obituary(server))
        for worker in ended:
            if worker.code in FATAL:
                raise RunError(Exit(worker.code), _obituary(worker))
            watcher.note(_obituary(worker))
        if ended and not running:
            deserted_at = time.monotonic()
        if time.monotonic() - deserted_at > LAST_WORD_SECONDS:
            raise RunError(Exit.INTERNAL, "no worker is left, and the job is not done")


def _start_server(plan: Plan, children: Children, interrupt: Interrupt) -> tuple[Child, int]:
    """The server and its port, once it answers.

    Between choosing a free port and listening on it, someone else may take it; then another one is tried.
    """
    for attempt in range(1, START_ATTEMPTS + 1):
        port = _free_port()
        server = children.start("server", plan.server, server_arguments(plan.options, port))
        with StatusClient(f"{HOST}:{port}") as client:
            deadline = time.monotonic() + START_SECONDS
            while server.code is None and time.monotonic() < deadline:
                if client.ask() is not None:
                    return server, port
                interrupt.pause(POLL_SECONDS)
        if server.code is None:
            limit = f"{START_SECONDS:g} s"
            raise RunError(Exit.INTERNAL, f"the server did not answer in {limit}; see {server.log}")
        if attempt == START_ATTEMPTS or not _is_taken(port):
            code = Exit.USAGE if server.code == Exit.USAGE else Exit.INTERNAL
            raise RunError(code, _obituary(server))
    raise AssertionError("the last attempt returns or raises")


def _free_port() -> int:
    with socket.create_server((HOST, 0)) as listener:
        return int(listener.getsockname()[1])


def _is_taken(port: int) -> bool:
    try:
        socket.create_server((HOST, port)).close()
    except OSError:
        return True
    return False


def _obituary(child: Child) -> str:
    said = "".join(f"\n    {line}" for line in child.last_lines().splitlines())
    return f"{child.name} ended: {child.ending}; the end of {child.log}:{said or ' it is empty'}"
