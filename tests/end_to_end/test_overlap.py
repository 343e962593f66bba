"""Updates that go down while gradients come up, with real processes."""

from __future__ import annotations

import signal
import time
from itertools import product

import pytest
from daemons import Daemon, Daemons, Server, stop
from test_training import finished

OVERLAPS = [("off", 0), ("backward", 16384), *product(["both"], [0, 16384, 65536])]


def started(daemons: Daemons, overlap: str, part_bytes: int, task: str = "digits") -> Server:
    return daemons.server(
        *("--task", task, "--min-workers", "3", "--epochs", "1", "--batch-size", "32", "--seed", "3"),
        *("--overlap", overlap, "--part-bytes", str(part_bytes), "--lease-seconds", "2"),
    )


def join(daemons: Daemons, server: Server, count: int = 3) -> list[Daemon]:
    arguments = ("--compressor", "topk:ratio=10")
    return [daemons.worker(server.address, "--worker-id", f"w{n}", *arguments) for n in range(count)]


def outcome(server: Server, workers: list[Daemon]) -> str:
    """SHA-256 of the parameters in the end, to which every push of every worker has contributed."""
    status = finished(server)
    assert [worker.wait() for worker in workers] == [0, 0, 0]
    assert (status.pushes, status.refused_pushes) == (3 * status.version, 0)
    stop(server)
    return status.parameters_sha256


def slow_down(worker: Daemon) -> None:
    worker.wait_for("ready for work")
    for _ in range(8):
        for number, seconds in ((signal.SIGSTOP, 0.2), (signal.SIGCONT, 0.1)):
            worker.signal(number)
            time.sleep(seconds)


def test_what_travels_while_workers_compute_has_no_say_in_the_bits(daemons: Daemons) -> None:
    """In the last run one worker gets a third of the time of the others."""
    found: set[str] = set()
    for overlap, part_bytes in OVERLAPS:
        server = started(daemons, overlap, part_bytes)
        workers = join(daemons, server)
        if (overlap, part_bytes) == OVERLAPS[-1]:
            slow_down(workers[1])
        found.add(outcome(server, workers))
    assert len(found) == 1


@pytest.mark.parametrize("compressor", ["topk:ratio=10", "none"])
def test_unusual_models_and_a_slow_worker_come_to_the_same_bits(daemons: Daemons, compressor: str) -> None:
    """A weight that two layers share, a layer that the loss does not reach, and a worker that takes three
    times as long, so that parts of the others wait for it."""
    found: set[str] = set()
    for overlap in ("off", "backward", "both"):
        server = started(daemons, overlap, 16384, "small_tasks:shared:samples=768")
        workers = [
            daemons.worker(
                server.address,
                *("--worker-id", f"w{place}", "--compressor", compressor),
                environ={"SLOWER": "3" if place == 1 else "1"},
            )
            for place in range(3)
        ]
        found.add(outcome(server, workers))
    assert len(found) == 1


def test_a_job_ends_although_a_worker_is_killed_while_parts_go_both_ways(daemons: Daemons) -> None:
    """One is slow, so that parts of the others wait for it when another is killed."""
    server = started(daemons, "both", 16384, "small_tasks:regression:width=4000,jitter=0.02")
    workers = join(daemons, server)
    for worker in workers:
        worker.wait_for("ready for work")
    workers[1].signal(signal.SIGKILL)
    workers[1].wait()
    status = finished(server)
    assert [workers[0].wait(), workers[2].wait()] == [0, 0]
    assert status.version > 0
    stop(server)
