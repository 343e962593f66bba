"""Trains one job with real processes on this machine: a server and its workers, watched until they are done.

    start the server on a free port -> start the workers -> poll both kinds of news -> end everything

News are the ends of processes and the server's Status. A worker that dies is named, and the run goes on with
the others, as a real job would; it stops when the server dies, when no worker is left, when one ends before
the first round, which waits for all of them, or when one ends for a reason that the others share: it was
refused, misused, or the task raised.
"""

from __future__ import annotations

import dataclasses
import re
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..common.exits import Exit
from ..proto.messages import Phase, StatusResponse
from ..settings import RunSettings
from .daemons import HOST, server_arguments, worker_arguments
from .interrupt import Interrupt, Interrupted
from .processes import Child, Children, RunError, wait
from .status import Ask, asking

POLL_SECONDS = 0.2
START_SECONDS = 120.0  # for a server to answer; importing torch on a busy machine takes its time
SAVE_SECONDS = 60.0  # for a server that is told to stop to write the parameters
LEAVE_SECONDS = 10.0  # for workers to end by themselves once the job is done
LAST_WORD_SECONDS = 2.0  # for the server to speak of the end after the last worker has left
SILENCE_SECONDS = 2.0  # without an answer of a server that has answered, before people are told
START_SILENCE_SECONDS = 10.0  # the same of one that is starting
DEAF_SECONDS = 120.0  # for a server that answers nothing to speak, once the last worker has left
START_ATTEMPTS = 3
PARAMETERS = "parameters.safetensors"

# Ends of a worker after which there is no point in going on without it.
FATAL = (Exit.USAGE, Exit.REFUSED, Exit.TASK)


class Watcher:
    """Is told how a run goes; this one keeps it to itself."""

    def update(self, status: StatusResponse, alive: int) -> None:
        """The job's state, several times a second, and how many worker processes run."""

    def note(self, text: str) -> None:
        """Something that a person should read."""


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """One run.

    directory: for the logs of its processes and the final parameters.
    server, worker: the modules that are run; other ones in tests.
    """

    settings: RunSettings
    directory: Path
    server: str = "gradwire.server.cli"
    worker: str = "gradwire.worker.cli"


def train(plan: RunPlan, watcher: Watcher, interrupt: Interrupt) -> StatusResponse:
    """Train the job to its end and return the server's last word on it.

    Returns, or raises, only once every process has ended.

    Raises:
        RunError: the run stopped before the job was done.
        Interrupted: a signal came. If it has a status, the server has written the parameters of its last
            version.
    """
    with Children(plan.directory) as children:
        server, port = _start_server(plan, children, watcher, interrupt)
        with asking(f"{HOST}:{port}", losses=True, measured=True) as ask:
            workers = [
                children.start(f"worker-{rank}", plan.worker, worker_arguments(plan.settings, port, rank))
                for rank in range(plan.settings.workers)
            ]
            try:
                final = _supervise(server, workers, ask, watcher, interrupt)
            except Interrupted as interrupted:
                status = ask()
                if status is not None and _has_begun(status):
                    interrupted.status = status
                    server.send(signal.SIGTERM)
                    wait([server], seconds=SAVE_SECONDS)
                raise
        wait(workers, seconds=LEAVE_SECONDS)
        return final


def _addresses(children: Sequence[Child]) -> str:
    """Where the metrics of the processes are; empty until all have said so in their logs, or have ended."""
    found: list[str] = []
    for child in children:
        said = re.search(r"metrics and probes on port (\d+)", child.log.read_text(errors="replace"))
        if said:
            found.append(f"{child.name} http://{HOST}:{said[1]}/metrics")
        elif child.code is None:
            return ""
    return f"metrics: {', '.join(found)}" if found else ""


class _Silence:
    """Tells people that the server does not answer, once each time, and when it does again."""

    def __init__(self, server: Child, watcher: Watcher, *, limit_s: float) -> None:
        self._server = server
        self._watcher = watcher
        self._limit_s = limit_s
        self._since = time.monotonic()
        self._told = False

    def asked(self, *, answered: bool) -> None:
        seconds = time.monotonic() - self._since
        name = f"{self._server.name} (pid {self._server.pid})"
        if answered:
            if self._told:
                self._watcher.note(f"{name} answers, after {seconds:.1f} s")
            self._since, self._told = time.monotonic(), False
        elif not self._told and seconds >= self._limit_s:
            self._told = True
            self._watcher.note(f"{name} has not answered for {seconds:.1f} s; its log is {self._server.log}")


def _supervise(
    server: Child, workers: list[Child], ask: Ask, watcher: Watcher, interrupt: Interrupt
) -> StatusResponse:
    running, dead = list(workers), list[Child]()
    silence, addresses = _Silence(server, watcher, limit_s=SILENCE_SECONDS), ""
    staffed_at, measured = time.monotonic(), None
    while True:
        interrupt.pause(POLL_SECONDS)
        # First who has ended, then the status: a job that was done before its last worker left says so.
        ended = [worker for worker in running if worker.code is not None]
        running = [worker for worker in running if worker not in ended]
        dead += ended
        if not addresses and (addresses := _addresses([server, *workers])):
            watcher.note(addresses)
        status = ask()
        if status is not None:
            watcher.update(status, len(running))
            measured = status.measured or measured  # which a job without members no longer tells
            if status.phase is Phase.FINISHED:
                _hear_the_lost(status, [*ended, *running], watcher, interrupt)
                return dataclasses.replace(status, measured=measured)
        if server.code is not None:
            code = Exit.DIVERGED if server.code == Exit.DIVERGED else Exit.INTERNAL
            raise RunError(code, _obituary(server))
        silence.asked(answered=status is not None)
        finishing = status is not None and status.phase is Phase.FINISHING
        for worker in ended:
            if worker.code in FATAL:
                raise RunError(Exit(worker.code), _obituary(worker))
        if status is not None and dead and not _has_begun(status):
            have = f"waits for {len(workers)} workers, and only {len(running)} can come"
            raise RunError(Exit.INTERNAL, f"{_obituary(dead[0])}\nthe first round {have}; run it again")
        for worker in ended:
            # Done is what a worker says that has heard of the end, which a silent server could not tell us.
            if worker.code != Exit.DONE or not (finishing or status is None):
                watcher.note(_obituary(worker))
        if running or finishing:  # what finishing takes, such as writing the parameters, is up to the server
            staffed_at = time.monotonic()
        elif time.monotonic() - staffed_at > (DEAF_SECONDS if status is None else LAST_WORD_SECONDS):
            raise RunError(Exit.INTERNAL, "no worker is left, and the job is not done")


def _hear_the_lost(
    status: StatusResponse, unheard: list[Child], watcher: Watcher, interrupt: Interrupt
) -> None:
    """A worker that failed in the last round may still be ending when the job is done: say why it did."""
    lost = {member.worker for member in status.lost}
    deadline = time.monotonic() + LAST_WORD_SECONDS
    for worker in (child for child in unheard if child.name in lost):
        while worker.code is None and time.monotonic() < deadline:
            interrupt.pause(POLL_SECONDS / 4)
        if worker.code in FATAL:
            raise RunError(Exit(worker.code), _obituary(worker))
        watcher.note(_obituary(worker) if worker.code is not None else f"{worker.name} was lost")


def _has_begun(status: StatusResponse) -> bool:
    """Whether the first round was opened; later ones make do with fewer workers."""
    waits = status.phase in (Phase.EMPTY, Phase.GATHERING) and status.version == 0
    return not waits or status.training_seconds > 0


def _start_server(
    plan: RunPlan, children: Children, watcher: Watcher, interrupt: Interrupt
) -> tuple[Child, int]:
    """The server and its port, once it answers.

    Between choosing a free port and listening on it, someone else may take it; then another one is tried.
    """
    for attempt in range(1, START_ATTEMPTS + 1):
        port = free_port()
        arguments = server_arguments(plan.settings, port, plan.directory / PARAMETERS)
        server = children.start("server", plan.server, arguments)
        silence = _Silence(server, watcher, limit_s=START_SILENCE_SECONDS)
        with asking(f"{HOST}:{port}") as ask:
            deadline = time.monotonic() + START_SECONDS
            while server.code is None and time.monotonic() < deadline:
                answered = ask() is not None
                silence.asked(answered=answered)
                if answered:
                    return server, port
                interrupt.pause(POLL_SECONDS)
        if server.code is None:
            limit = f"{START_SECONDS:g} s"
            raise RunError(Exit.INTERNAL, f"the server did not answer in {limit}; see {server.log}")
        if attempt == START_ATTEMPTS or not _is_taken(port):
            code = Exit.USAGE if server.code == Exit.USAGE else Exit.INTERNAL
            raise RunError(code, _obituary(server))
    raise AssertionError("the last attempt returns or raises")


def free_port() -> int:
    """A port that nobody listens on, at this moment."""
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
