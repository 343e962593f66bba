"""Updates that go down while gradients come up, with real processes."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest
from daemons import Daemon, Daemons, Server, stop
from relay import Plan, Relay
from test_training import finished

from gradwire.proto import messages as m

OVERLAPS: list[tuple[str, int, int | None]] = [
    *(("off", 0, None), ("backward", 16384, None)),
    *(("both", 16384, None), ("both", 16384, 0), ("both", 8192, 2), ("both", 65536, None)),
]


def started(
    daemons: Daemons, overlap: str, part_bytes: int, task: str = "digits", credit: int | None = None
) -> Server:
    """credit: also have the parts of the first layers go first."""
    turns: dict[str, Any] = {} if credit is None else {"program": ("turns_server", str(credit))}
    return daemons.server(
        *("--task", task, "--min-workers", "3", "--epochs", "1", "--batch-size", "32", "--seed", "3"),
        *("--overlap", overlap, "--part-bytes", str(part_bytes), "--lease-seconds", "2"),
        **turns,
    )


def join(daemons: Daemons, address: str, count: int = 3) -> list[Daemon]:
    arguments = ("--compressor", "topk:ratio=10")
    return [daemons.worker(address, "--worker-id", f"w{n}", *arguments) for n in range(count)]


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


CUTS = Plan(seed=1, kinds=("cut",), gap_bytes=(100_000, 200_000), faults=4)


def test_what_travels_while_workers_compute_has_no_say_in_the_bits(daemons: Daemons) -> None:
    """Nor in which order parts travel. With a credit connections break; in the last run one worker gets a
    third of the time of the others."""
    found: set[str] = set()
    for overlap, part_bytes, credit in OVERLAPS:
        server = started(daemons, overlap, part_bytes, credit=credit)
        relay = Relay(server.port, plan=CUTS if credit else None)
        workers = join(daemons, f"127.0.0.1:{relay.port}")
        if (overlap, part_bytes, credit) == OVERLAPS[-1]:
            slow_down(workers[1])
        found.add(outcome(server, workers))
        relay.close()
        assert len(relay.happened) == (4 if credit else 0)
    assert len(found) == 1


def test_a_spike_is_named_and_goes_out_at_once_however_parts_travel(daemons: Daemons) -> None:
    """Its tensors travel as float32 in that step, in parts beside those of a worker without a spike."""
    found: set[str] = set()
    for overlap in ("off", "backward", "both"):
        server = daemons.server(
            *("--task", "small_tasks:spiked", "--min-workers", "2", "--epochs", "1", "--batch-size", "4"),
            *("--seed", "3", "--overlap", overlap, "--learning-rate", "1e-7"),
        )
        workers: list[Daemon] = []
        for number in range(2):  # one after the other, so that both have the same samples each time
            arguments = ("--worker-id", f"w{number}", "--compressor", "1bit")
            environ = {"SPIKES": "1"} if number else {}
            workers.append(daemons.worker(server.address, *arguments, environ=environ))
            workers[-1].wait_for(f"connected as rank {number}")
        said = workers[1].wait_for(
            r"worker w1, version 15: gradient of '([^']+)' is (\S+) times as large as usual"
        )
        assert float(said[2]) > 1e4
        status = finished(server)
        assert [worker.wait() for worker in workers] == [0, 0]
        assert "times as large as usual" not in workers[0].log
        assert workers[1].log.count("times as large as usual") == 1
        stop(server)
        found.add(status.parameters_sha256)
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


def with_a_substitute(daemons: Daemons, server: Server, version: str) -> m.StatusResponse:
    """Train with three workers; the second is killed between two parts, and another one pushes the rest."""
    workers = [
        daemons.worker(
            server.address,
            *("--worker-id", f"w{place}", "--compressor", "topk:ratio=10"),
            environ={"DIES": "1"} if place == 1 else None,
        )
        for place in range(3)
    ]
    status = finished(server)
    assert [worker.wait() for worker in workers] == [0, -signal.SIGKILL, 0]
    server.wait_for(rf"rank \d \(w1\) is lost: rank \d \(w[02]\) computes its part of version {version}")
    missing = server.wait_for(r"worker 'w[02]' pushes the missing parts: (\d+) of (\d+)")
    assert 0 < int(missing[1]) < int(missing[2])
    return status


def test_what_a_worker_left_that_was_killed_between_two_parts_another_computes(daemons: Daemons) -> None:
    """384 samples: three rounds of three times 16, the last with a push in the lost worker's place, and eight
    rounds of twice 16."""
    server = daemons.server(
        *("--task", "small_tasks:dying:width=4000,samples=384", "--min-workers", "3", "--epochs", "1"),
        *("--batch-size", "16", "--overlap", "both", "--part-bytes", "16384", "--lease-seconds", "2"),
    )
    status = with_a_substitute(daemons, server, version=r"3")
    assert (status.version, status.pushes, status.refused_pushes) == (11, 25, 0)
    assert status.repeated_samples == 0
    stop(server)


@pytest.mark.parametrize(
    ("steps", "optimizer", "compressor"),
    [
        ("steps=3,correction=0.1", "sgd:momentum=0.9", "topk:ratio=10"),
        ("steps=adaptive,first=2,most=4,correction=0", "adamw", "none"),
        ("steps=2,correction=0", "adamw", "1bit:block=4096,decay=0.9"),
    ],
)
def test_local_steps_come_to_the_same_bits_however_their_changes_travel(
    daemons: Daemons, steps: str, optimizer: str, compressor: str
) -> None:
    found: set[str] = set()
    for overlap in ("off", "backward", "both"):
        server = daemons.server(
            *("--task", "digits", "--mode", f"local:{steps}", "--min-workers", "3", "--epochs", "1"),
            *("--batch-size", "16", "--seed", "3", "--optimizer", optimizer, "--overlap", overlap),
            *("--learning-rate", "0.01", "--schedule", "cosine", "--part-bytes", "16384"),
        )
        workers = [
            daemons.worker(server.address, "--worker-id", f"w{n}", "--compressor", compressor)
            for n in range(3)
        ]
        found.add(outcome(server, workers))
        assert f"overlap {overlap}" in server.log
    assert len(found) == 1


def test_another_worker_sends_the_changes_that_a_killed_one_had_not(daemons: Daemons) -> None:
    """It dies in the last of three steps of its first round."""
    server = daemons.server(
        *("--task", "small_tasks:dying:width=4000,samples=384", "--min-workers", "3", "--epochs", "1"),
        *("--mode", "local:steps=3,correction=0.1", "--batch-size", "8"),
        *("--overlap", "both", "--part-bytes", "16384", "--lease-seconds", "2"),
    )
    status = with_a_substitute(daemons, server, version=r"\d+")
    assert (status.refused_pushes, status.repeated_samples) == (0, 0)
    stop(server)
