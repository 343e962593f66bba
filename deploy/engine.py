"""Train one job on this machine: start a server and workers, and supervise them until the job is done.

    start the server -> start the workers -> poll exit codes and Status -> end all processes

A worker that dies is reported, and the job continues with the other workers. The run fails if

    the server dies or does not start
    no worker is left
    a worker ends before the first round, which waits for all workers
    a worker ends with a code in `FATAL`: every other worker would end alike

With --script the workers are processes of the user's command, and the run also fails if

    a script fails: another exit code than 0, or a signal
    a script ends before the first round, or does not join in --progress-seconds
    a script names another compressor than the run
"""

from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..common.exits import Exit
from ..proto.messages import Phase, StatusResponse
from ..settings import RunSettings
from . import scripts
from .daemons import at, server_arguments, worker_arguments
from .interrupt import Interrupt, Interrupted
from .processes import Child, Children, RunError, wait
from .status import Ask, asking

POLL_SECONDS = 0.2

# Limits of waiting:
START_SECONDS = 120.0  # until the server listens, after its imports
SAVE_SECONDS = 60.0  # until a stopped server has written the parameters
LEAVE_SECONDS = 10.0  # until workers have exited once the job is done

LAST_WORD_SECONDS = 2.0  # from the last worker's exit until the server reports the end
UNANSWERED_SECONDS = 120.0  # the same while the server does not answer at all

# The watcher is told of a server that has not answered for so long:
SILENCE_SECONDS = 2.0
START_SILENCE_SECONDS = 10.0  # while the server starts
PARAMETERS = "parameters.safetensors"

SCRIPT_FAILED = "the script failed"  # a worker's reason to leave: `worker/script/part`

# Exit codes of a worker that all workers would end with, for the same reason.
FATAL = (Exit.USAGE, Exit.REFUSED, Exit.TASK)


class Watcher:
    """The interface through which `train` reports a run's progress. This base class ignores it."""

    def update(self, status: StatusResponse, alive: int) -> None:
        """Called several times a second with the server's last status, and the number of running workers."""

    def note(self, text: str) -> None:
        """Called with a message for the user, such as the end of a worker."""


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """One run: options, a folder for logs and final parameters, and the modules to run as server and
    workers.

    Attributes:
        environ: variables of gc-run, which scripts get, too.
        compressor_fixed: True if no script may use another compressor than the one of `settings`.
    """

    settings: RunSettings
    directory: Path
    environ: Mapping[str, str] = field(default_factory=dict[str, str])
    compressor_fixed: bool = False
    server: str = "gradwire.server.cli"
    worker: str = "gradwire.worker.cli"


def train(plan: RunPlan, watcher: Watcher, interrupt: Interrupt) -> StatusResponse:
    """Train the job to its end and return the server's last status.

    Every process has ended when this returns.

    Raises:
        RunError: if the run failed, also if that was after the job's end. Its status is set if there is a
            version.
        Interrupted: if a signal arrived. Its status is set if training had begun.
    """
    with Children(plan.directory) as children:
        server, port = _start_server(plan, children, watcher, interrupt)
        with asking(at(port), losses=True, measured=True, departed=bool(plan.settings.script)) as ask:
            workers = [_start_worker(plan, children, port, rank) for rank in range(plan.settings.workers)]
            watch = _Scripts(plan, server, workers) if plan.settings.script else None
            try:
                final = _supervise(server, workers, watch, ask, watcher, interrupt)
                if watch is not None:
                    watch.wait(final, watcher, interrupt)
            except (Interrupted, RunError) as error:
                status = ask()
                if status is not None and _has_begun(status) and (status.version or error.code > 128):
                    error.status = status
                    server.send(signal.SIGTERM)
                    wait([server], seconds=SAVE_SECONDS)
                raise
        wait(workers, seconds=LEAVE_SECONDS)
        return final


def _start_worker(plan: RunPlan, children: Children, port: int, index: int) -> Child:
    """Start a worker: gc-worker, or the command of --script."""
    name, settings = f"worker-{index}", plan.settings
    if not settings.script:
        return children.start(name, plan.worker, worker_arguments(settings, port, index))
    return children.start(
        name,
        "gradwire.deploy.command",
        scripts.command_of(settings, plan.environ),
        environ=scripts.script_environ(settings, port, index, plan.environ),
    )


def _addresses(children: Sequence[Child]) -> str:
    """Return a line with the addresses of all processes' metrics.

    It is empty until every running process has told its own.
    """
    found: list[str] = []
    for child in children:
        if port := child.ports.get("http"):
            found.append(f"{child.name} http://{at(port)}/metrics")
        elif child.code is None:
            return ""
    return f"metrics: {', '.join(found)}" if found else ""


class _Silence:
    """A detector that notes once when the server has stopped answering, and once when it answers again."""

    def __init__(self, server: Child, watcher: Watcher, *, limit_s: float) -> None:
        self._server = server
        self._watcher = watcher
        self._limit_s = limit_s
        self._since = time.monotonic()
        self._told = False

    def asked(self, *, answered: bool) -> None:
        """Record an attempt to ask the server for its status."""
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
    server: Child,
    workers: list[Child],
    watch: _Scripts | None,
    ask: Ask,
    watcher: Watcher,
    interrupt: Interrupt,
) -> StatusResponse:
    """Poll the processes and the server's status until the job is done; return the last status. `watch`
    checks scripts.

    Raises:
        RunError: if the run has failed, by the rules at the head of this module.
    """
    running, dead = list(workers), list[Child]()
    silence, addresses = _Silence(server, watcher, limit_s=SILENCE_SECONDS), ""
    staffed_at, measured = time.monotonic(), None
    while True:
        interrupt.pause(POLL_SECONDS)
        # Exit codes first. If the job was done before its last worker left, the status that follows says so.
        ended = [worker for worker in running if worker.code is not None]
        running = [worker for worker in running if worker not in ended]
        dead += ended
        if not addresses and (addresses := _addresses([server, *([] if watch else workers)])):
            watcher.note(addresses)
        status = ask()
        if status is not None:
            watcher.update(status, len(running))
            measured = status.measured or measured  # absent once the job has no members
            if watch is None and status.phase is Phase.FINISHED:
                _report_lost(status, [*ended, *running], watcher, interrupt)
            if status.phase is Phase.FINISHED:
                return dataclasses.replace(status, measured=measured)
        if server.code is not None:
            code = Exit.DIVERGED if server.code == Exit.DIVERGED else Exit.INTERNAL
            raise RunError(code, _failure_of(server))
        silence.asked(answered=status is not None)
        finishing = status is not None and status.phase is Phase.FINISHING
        if watch is not None:
            watch.check(status, ended)
        for worker in ended:
            if worker.code in FATAL:
                raise RunError(Exit(worker.code), _failure_of(worker))
        if status is not None and dead and not _has_begun(status):
            have = f"waits for {len(workers)} workers, and only {len(running)} are left"
            raise RunError(Exit.INTERNAL, f"{_failure_of(dead[0])}\nthe first round {have}; run it again")
        for worker in ended:
            # Exit code 0: the server has told the worker that the job is done, even if it does not answer us.
            if worker.code != Exit.DONE or not (finishing or status is None):
                watcher.note(_failure_of(worker) if watch is None else f"{worker.name}'s script has ended")
        if running or finishing:  # a finishing server is still writing the parameters
            staffed_at = time.monotonic()
        elif time.monotonic() - staffed_at > (UNANSWERED_SECONDS if status is None else LAST_WORD_SECONDS):
            why = "no worker is left, and the job is not done"
            raise RunError(Exit.INTERNAL, f"{why}; {scripts.CALLS}" if watch is not None else why)


class _Scripts:
    """The checks of scripts: the rules of --script at the head of this module."""

    def __init__(self, plan: RunPlan, server: Child, workers: Sequence[Child]) -> None:
        self._plan = plan
        self._server = server
        self._workers = workers
        self._began = time.monotonic()
        self._ranks: dict[str, int] = {}
        self._status: StatusResponse | None = None
        self._awaited = set[str]()  # workers whose scripts have raised, once their end has been waited for
        self._left: list[Child] = []  # scripts that have ended, in their order

    def check(self, status: StatusResponse | None, ended: Sequence[Child]) -> None:
        """Check the scripts that have ended, and those that have not joined.

        Raises:
            RunError: the run has failed.
        """
        if status is not None:
            self._note(status)
            raised = {each.worker for each in status.lost if each.reason.startswith(SCRIPT_FAILED)}
            failing = [child for child in self._workers if child.name in raised - self._awaited]
            # The interpreter of a script that has raised is about to end.
            wait(failing, seconds=LEAVE_SECONDS)
            self._awaited |= raised
            ended = [*ended, *(child for child in failing if child.code is not None)]
        self._left += ended
        for child in self._left:
            if child.code != Exit.DONE:
                raise self._failure(child)
            if status is not None and not _has_begun(status):
                raise RunError(
                    Exit.TASK,
                    f"{child.name}{self._place(child)} has ended before the job began; {scripts.CALLS}. Its "
                    f"log is {child.log}",
                )
        limit_s = self._plan.settings.progress_seconds
        few = len(self._ranks) < len(self._workers)  # a script may give itself another id
        absent = [child for child in self._workers if few and child.name not in self._ranks]
        if absent and limit_s and time.monotonic() - self._began > limit_s:
            raise RunError(
                Exit.TASK,
                f"{absent[0].name} has not joined the job for {limit_s:g} s (--progress-seconds); "
                f"{scripts.CALLS}. Its log is {absent[0].log}",
            )

    def wait(self, final: StatusResponse, watcher: Watcher, interrupt: Interrupt) -> None:
        """Wait until the scripts have ended after the job, for at most --progress-seconds.

        Raises:
            RunError: one of them fails.
        """
        self._note(final)
        began, limit_s, told = time.monotonic(), self._plan.settings.progress_seconds, False
        while running := [child.name for child in self._workers if child.code is None]:
            waited_s, names = time.monotonic() - began, ", ".join(running)
            if not told and waited_s > LEAVE_SECONDS:
                told = True
                watcher.note(f"the job is done; waiting for the end of the scripts of {names}")
            if limit_s and waited_s > limit_s:
                watcher.note(f"{names}: the script has not ended {limit_s:g} s after the job, and is stopped")
                return
            interrupt.pause(POLL_SECONDS)
        for child in self._workers:
            if child.code != Exit.DONE:
                raise self._failure(child)

    def _note(self, status: StatusResponse) -> None:
        """Note a status, and which workers have joined. Raises RunError for a compressor of a script's
        own."""
        self._status = status
        self._ranks = {worker: member.rank for worker, member in scripts.joined(status).items()}
        settings, other = self._plan.settings, None
        if self._plan.compressor_fixed:
            other = scripts.other_compressor(settings, status)
        if other is not None:
            words = settings.compressor, other.worker, other.compressor
            raise RunError(Exit.USAGE, scripts.CONTRADICTION.format(*words))

    def _failure(self, child: Child) -> RunError:
        return RunError(Exit.TASK, scripts.failure_of(child, self._place(child)))

    def _place(self, child: Child) -> str:
        """Return the rank of a worker, with the epoch and version of its end, as far as known."""
        status, found = self._status, list[str]()
        lost = [each for each in status.lost if each.worker == child.name] if status is not None else []
        if lost:
            found = [f"rank {lost[-1].rank}", f"version {lost[-1].version}"]
        elif child.name in self._ranks and status is not None:
            found = [f"rank {self._ranks[child.name]}", f"version {status.version}"]
        if found and status is not None and status.phase is Phase.RUNNING:
            found.insert(1, f"epoch {status.epoch + 1}")
        return f" ({', '.join(found)})" if found else ""


def _report_lost(
    status: StatusResponse, unreported: list[Child], watcher: Watcher, interrupt: Interrupt
) -> None:
    """Note workers lost in the last round, of the processes whose end has not been noted. They may still be
    exiting when the job is done.

    Raises:
        RunError: if one of the lost workers ended with a code in `FATAL`.
    """
    lost = {member.worker for member in status.lost}
    deadline = time.monotonic() + LAST_WORD_SECONDS
    for worker in (child for child in unreported if child.name in lost):
        while worker.code is None and time.monotonic() < deadline:
            interrupt.pause(POLL_SECONDS / 4)
        if worker.code in FATAL:
            raise RunError(Exit(worker.code), _failure_of(worker))
        watcher.note(_failure_of(worker) if worker.code is not None else f"{worker.name} was lost")


def _has_begun(status: StatusResponse) -> bool:
    """Return True once the first round has been opened. Later rounds need fewer workers."""
    waits = status.phase in (Phase.EMPTY, Phase.GATHERING) and status.version == 0
    return not waits or status.training_seconds > 0


def _start_server(
    plan: RunPlan, children: Children, watcher: Watcher, interrupt: Interrupt
) -> tuple[Child, int]:
    """Start the server and return it, once it listens, with the port that it has got.

    Raises:
        RunError: if the server does not listen in time, or ends.
    """
    server = children.start(
        "server", plan.server, server_arguments(plan.settings, 0, plan.directory / PARAMETERS)
    )
    silence = _Silence(server, watcher, limit_s=START_SILENCE_SECONDS)
    deadline = time.monotonic() + START_SECONDS
    while server.code is None and time.monotonic() < deadline:
        if port := server.ports.get("grpc"):
            return server, port
        silence.asked(answered=False)
        interrupt.pause(POLL_SECONDS)
    if server.code is None:
        raise RunError(Exit.INTERNAL, f"the server did not listen in {START_SECONDS:g} s; see {server.log}")
    raise RunError(Exit.USAGE if server.code == Exit.USAGE else Exit.INTERNAL, _failure_of(server))


def _failure_of(child: Child) -> str:
    """Return a message that tells how a process ended, with the last lines of its log."""
    said = "".join(f"\n    {line}" for line in child.last_lines().splitlines())
    return f"{child.name} ended: {child.ending}; the end of {child.log}:{said or ' it is empty'}"
