"""Jobs of real daemons: `run_job` with any programs and links, `train` in the way of gc-run."""

from __future__ import annotations

import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ..common.exits import Exit
from ..deploy.daemons import free_port, loopback, server_arguments, worker_arguments
from ..deploy.engine import PARAMETERS, RunPlan, Watcher
from ..deploy.engine import train as run_plan
from ..deploy.interrupt import Interrupt
from ..deploy.processes import Child, Children, wait
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
    watch: Callable[[StatusResponse, RunningJob], None] | None = None,
) -> StatusResponse:
    """Run a job to its end and return the server's last status.

    Args:
        settings: options of the job.
        directory: for logs and parameters.
        server: program to run in place of gc-server.
        server_options: options of the server that `settings` lacks.
        worker: function from a rank to the program to run in place of gc-worker.
        star: the network, with the nodes of `nodes_of`; None for this machine's loopback.
        watch: called with every status and with the job, whose processes it may kill and start.

    Raises:
        BenchError: if the job does not finish.
    """
    host, port = (star.address("server"), 50051) if star else (loopback(), free_port())
    remote = ("--host=0.0.0.0", "--insecure") if star else ()
    programs: dict[str, tuple[Program, Sequence[str]]] = {
        "server": (
            server,
            [*server_arguments(settings, port, directory / PARAMETERS), *remote, *server_options],
        )
    }
    for rank in range(settings.workers):
        arguments = [*worker_arguments(settings, port, rank), f"--server={host}:{port}"]
        programs[f"worker-{rank}"] = (worker(rank), arguments)
    with Children(directory) as children:
        job = RunningJob(children, programs, star)
        for node in programs:
            job.start(node)
        with asking(f"{host}:{port}") as ask:
            deadline, version = time.monotonic() + PATIENCE_S, 0
            while (status := ask()) is None or status.phase is not Phase.FINISHED:
                if status is not None and status.version > version:
                    deadline, version = time.monotonic() + PATIENCE_S, status.version
                check_running(list(job.processes.values()), deadline)
                time.sleep(0.1)
                if watch is not None and status is not None:
                    watch(status, job)
    return status


class RunningJob:
    """The processes of a job, one for each node.

    Attributes:
        processes: running processes by node: `server`, `worker-0`, …
    """

    def __init__(
        self, children: Children, programs: Mapping[str, tuple[Program, Sequence[str]]], star: Star | None
    ) -> None:
        self.processes: dict[str, Child] = {}
        self._children, self._programs, self._star = children, programs, star

    def start(self, node: str) -> None:
        """Start the process of a node."""
        (module, *first), arguments = self._programs[node]
        prefix = self._star.prefix(node) if self._star else ()
        self.processes[node] = self._children.start(node, module, [*first, *arguments], prefix)

    def kill(self, node: str) -> None:
        """Send the process of a node SIGKILL, and wait for its end."""
        child = self.processes.pop(node)
        child.send(signal.SIGKILL)
        wait([child], seconds=PATIENCE_S)


def final_loss(name: str, status: StatusResponse) -> float:
    """Return the loss of a finished job's last evaluation.

    Raises:
        BenchError: the evaluation was lost, or reported no finite loss.
    """
    found = status.evaluations[-1].metrics.get("loss") if status.evaluations else None
    if found is None:
        raise BenchError(f"{name}: the last evaluation reported no finite loss")
    return found


def check_running(children: Sequence[Child], deadline: float) -> None:
    """Raise BenchError if a process has failed, or if the monotonic clock has passed the deadline."""
    failed = [child for child in children if child.code not in (None, Exit.DONE)]
    if failed or time.monotonic() > deadline:
        child = (failed or children)[0]
        reason = "failed" if failed else "made no progress in the time that it has"
        raise BenchError(f"{child.name} {reason}: {child.ending}: {child.last_lines()}")


def wait_for(
    found: Callable[[], Found | None], children: Sequence[Child], seconds: float = PATIENCE_S
) -> Found:
    """Poll until `found` returns a value other than None, and return it.

    Raises:
        BenchError: if a process fails meanwhile, or after `seconds`.
    """
    deadline = time.monotonic() + seconds
    while (result := found()) is None:
        check_running(children, deadline)
        time.sleep(0.05)
    return result


def run_ranks(
    nodes: Sequence[str],
    module: str,
    arguments: Callable[[int], Sequence[str]],
    directory: Path,
    *,
    star: Star | None,
    seconds: float = PATIENCE_S,
) -> None:
    """Run a program on each node, as ranks of PyTorch's distributed package, and wait until all have ended.

    Args:
        nodes: names of the nodes, by rank.
        module: the program.
        arguments: function from a rank to its arguments.
        directory: for logs.
        star: the network; None for this machine's loopback.
        seconds: time after which to give up.

    Raises:
        BenchError: if one fails, or after `seconds`.
    """
    with Children(directory) as children:
        ranks = [
            children.start(
                node,
                module,
                arguments(rank),
                (*star.prefix(node), "env", "GLOO_SOCKET_IFNAME=eth0") if star else (),
            )
            for rank, node in enumerate(nodes)
        ]
        wait_for(lambda: all(child.code == Exit.DONE for child in ranks) or None, ranks, seconds)


def nodes_of(workers: int) -> list[str]:
    """Return the names of the nodes of a job's network: the server and its workers."""
    return ["server", *(f"worker-{rank}" for rank in range(workers))]


def one_slower(workers: int, factor: float) -> Callable[[int], Program]:
    """Return a function from a rank to the worker program for `paced` tasks; the last of the workers sleeps
    longer by `factor`."""
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


def train_job(mbit: float = 0.0, **options: Any) -> RunResult:
    """Train a job as gc-run does, in a folder that is gone afterwards.

    Args:
        mbit: Mbit/s of the link of each process in each direction, which needs root; 0 for this machine's
            loopback.
        options: options of gc-run by name, such as task, workers, seed.

    Raises:
        RunError: the run fails.
        BenchError: it fails behind shaped links.
    """
    settings = RunSettings(**options)
    with tempfile.TemporaryDirectory() as folder:
        if not mbit:
            return train(settings, Path(folder))
        with Star(nodes_of(settings.workers), mbit) as star:
            return result_of(settings, run_job(settings, Path(folder), star=star))
