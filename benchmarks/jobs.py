"""Jobs of real daemons: `run_job` with any programs and links, `train` in the way of gc-run."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from ..common.exits import Exit
from ..deploy.daemons import HOST, server_arguments, worker_arguments
from ..deploy.engine import PARAMETERS, RunPlan, Watcher, free_port
from ..deploy.engine import train as run_plan
from ..deploy.interrupt import Interrupt
from ..deploy.processes import Child, Children
from ..deploy.report import RunResult, result_of
from ..deploy.status import asking
from ..proto.messages import Phase, StatusResponse
from ..settings import RunSettings
from .arguments import BenchError
from .star import Star

Found = TypeVar("Found")
PATIENCE_S = 600.0  # a job without a new version for longer has failed
DIGITS_SAMPLES = 1408  # in an epoch of digits
Program = Sequence[str]  # a module and its first arguments


def run_job(
    settings: RunSettings,
    directory: Path,
    *,
    server: Program = ("gradwire.server.cli",),
    server_options: Sequence[str] = (),
    worker: Callable[[int], Program] = lambda rank: ("gradwire.worker.cli",),
    star: Star | None = None,
    watch: Callable[[StatusResponse, Callable[[int], None]], None] | None = None,
) -> StatusResponse:
    """Run a job to its end and return the server's last status.

    Args:
        settings: options of the job.
        directory: for logs and parameters.
        server: program to run in place of gc-server.
        server_options: options of the server that `settings` lacks.
        worker: function from a rank to the program to run in place of gc-worker.
        star: the network, with the nodes of `nodes_of`; None for this machine's loopback.
        watch: called with every status, and with a function that kills and restarts the worker of a rank.

    Raises:
        BenchError: if the job does not finish.
    """
    host, port = (star.address("server"), 50051) if star else (HOST, free_port())
    with Children(directory) as children:

        def start(node: str, program: Program, arguments: Sequence[str]) -> Child:
            module, *first = program
            return children.start(node, module, [*first, *arguments], star.prefix(node) if star else ())

        def start_worker(rank: int) -> Child:
            arguments = [*worker_arguments(settings, port, rank), f"--server={host}:{port}"]
            return start(f"worker-{rank}", worker(rank), arguments)

        def restart(rank: int) -> None:
            workers[rank].send(signal.SIGKILL)
            workers[rank] = start_worker(rank)

        remote = ("--host=0.0.0.0", "--insecure") if star else ()
        arguments = [*server_arguments(settings, port, directory / PARAMETERS), *remote, *server_options]
        daemon = start("server", server, arguments)
        workers = [start_worker(rank) for rank in range(settings.workers)]
        with asking(f"{host}:{port}") as ask:
            deadline, version = time.monotonic() + PATIENCE_S, 0
            while (status := ask()) is None or status.phase is not Phase.FINISHED:
                if status is not None and status.version > version:
                    deadline, version = time.monotonic() + PATIENCE_S, status.version
                check_running([daemon, *workers], deadline)
                time.sleep(0.1)
                if watch is not None and status is not None:
                    watch(status, restart)
    return status


def check_running(children: Sequence[Child], deadline: float) -> None:
    """Raise BenchError if a process has failed, or if the monotonic clock has passed the deadline."""
    failed = [child for child in children if child.code not in (None, Exit.DONE)]
    if failed or time.monotonic() > deadline:
        child = (failed or children)[0]
        reason = "failed" if failed else f"made no progress for {PATIENCE_S:g} s"
        raise BenchError(f"{child.name} {reason}: {child.ending}: {child.last_lines()}")


def wait_for(found: Callable[[], Found | None], children: Sequence[Child]) -> Found:
    """Poll until `found` returns a value other than None, and return it.

    Args:
        found: function to poll.
        children: processes that must not fail meanwhile.

    Raises:
        BenchError: if a process fails, or after `PATIENCE_S`.
    """
    deadline = time.monotonic() + PATIENCE_S
    while (result := found()) is None:
        check_running(children, deadline)
        time.sleep(0.05)
    return result


def nodes_of(workers: int) -> list[str]:
    """Return the names of the nodes of a job's network: the server and its workers."""
    return ["server", *(f"worker-{rank}" for rank in range(workers))]


def one_slower(workers: int, factor: float) -> Callable[[int], Program]:
    """Return a function from a rank to a worker program for `paced` tasks, with one slow worker.

    Args:
        workers: number of workers; the last one is slow.
        factor: factor of its times.
    """
    return lambda rank: ("gradwire.benchmarks.paced", str(factor if rank == workers - 1 else 1))


def train(settings: RunSettings, directory: Path) -> RunResult:
    """Train a job as gc-run does and return its result.

    Raises:
        RunError: if the run fails.
        Interrupted: if a signal arrives.
    """
    with Interrupt() as interrupt:
        plan = RunPlan(settings=settings, directory=directory)
        return result_of(settings, run_plan(plan, Watcher(), interrupt))
