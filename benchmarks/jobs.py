"""Jobs of real daemons: `run_job` with programs and links of one's own, `train` as gc-run does."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

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

PATIENCE_S = 600.0  # with a job that does not move
DIGITS_SAMPLES = 1408  # in an epoch
Program = Sequence[str]  # a module, and arguments that come first


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
    """One job to its end; returns the server's last status.

    Args:
        settings: of the job and its workers.
        directory: for logs and parameters.
        server: run instead of gc-server.
        server_options: that a job's settings do not have.
        worker: run instead of gc-worker, by rank.
        star: the network, with the nodes `server` and `worker-0` on; None for this machine alone.
        watch: called with every status, and with a function that kills a worker and starts it again.

    Raises:
        BenchError: the job does not come to its end.
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
                ended = [
                    child
                    for child in (daemon, *workers)
                    if child.code not in (None, Exit.DONE, -signal.SIGKILL)
                ]
                if ended or time.monotonic() > deadline:
                    why = (ended or [daemon])[0]
                    raise BenchError(f"the job did not end: {why.name}: {why.ending}: {why.last_lines()}")
                time.sleep(0.1)
                if watch is not None and status is not None:
                    watch(status, restart)
    return status


def one_slower(workers: int, factor: float) -> Callable[[int], Program]:
    """Workers of `paced` tasks for `run_job`, of which the last one is so much slower."""
    return lambda rank: ("gradwire.benchmarks.paced", str(factor if rank == workers - 1 else 1))


def train(settings: RunSettings, directory: Path) -> RunResult:
    """One job as gc-run trains it. Raises RunError and Interrupted."""
    with Interrupt() as interrupt:
        plan = RunPlan(settings=settings, directory=directory)
        return result_of(settings, run_plan(plan, Watcher(), interrupt))
