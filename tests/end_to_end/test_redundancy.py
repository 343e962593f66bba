"""Redundancy with real processes: slices that halve the uplink, and codes that do without stragglers."""

from __future__ import annotations

import json
import signal
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from daemons import TASKS, Daemon, Daemons, Server, asked, poll
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]
from test_modes import COMING_AND_GOING, PACED
from test_training import SMALL, finished, small_job

from gradwire.proto import messages as m
from gradwire.worker.tasks import load
from gradwire.worker.training.sharding import epoch_order

DIGITS = ("--task", "digits:model=mlp", "--seed", "1")


def digits(daemons: Daemons, *arguments: str, compressor: str = "none") -> tuple[Server, list[Daemon]]:
    server = daemons.server(*DIGITS, "--min-workers", "4", *arguments)
    return server, daemons.workers(server, 4, "--compressor", compressor)


def trained(
    daemons: Daemons, output: Path, *arguments: str
) -> tuple[dict[str, torch.Tensor], m.StatusResponse]:
    server, started = digits(daemons, "--epochs", "2", "--output", str(output), *arguments)
    reply = finished(server)
    assert [worker.wait() for worker in started] == [0] * 4
    return load_file(output), reply


def progressed(server: Server) -> bool:
    return asked(server).version > 5


def accuracy(reply: m.StatusResponse) -> float:
    return reply.evaluations[-1].metrics["accuracy"]


# ---- slices


def test_slices_halve_what_goes_up_and_change_nothing_else(daemons: Daemons, tmp_path: Path) -> None:
    plain, calm = trained(daemons, tmp_path / "plain")
    sliced, reply = trained(daemons, tmp_path / "sliced", "--mode", "sync:redundancy=2")
    assert reply.version == calm.version
    assert reply.traffic.payload_bytes_up == pytest.approx(calm.traffic.payload_bytes_up / 2, rel=0.02)
    for name, parameter in plain.items():
        torch.testing.assert_close(sliced[name], parameter, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("compressor", "rate"),
    [("4bit", "0.3"), ("dgc:ratio=20,warmup=2", "0.05")],
)
def test_slices_go_with_any_compressor(daemons: Daemons, compressor: str, rate: str) -> None:
    arguments = ("--mode", "sync:redundancy=2", "--epochs", "6", "--learning-rate", rate)
    server, workers = digits(daemons, *arguments, compressor=compressor)
    reply = finished(server)
    assert [worker.wait() for worker in workers] == [0] * 4
    assert accuracy(reply) > 0.7
    assert reply.refused_pushes == reply.repeated_samples == 0


def test_members_that_do_not_divide_into_groups_are_said_once(daemons: Daemons) -> None:
    server = small_job(daemons, "--mode", "sync:redundancy=2", workers=3)
    workers = daemons.workers(server, 3)
    finished(server)
    assert [worker.wait() for worker in workers] == [0] * 3
    said = "redundancy=2: a round of 3 members is divided in groups of 1"
    assert sum(said in text for text in server.messages) == 1


@pytest.mark.parametrize("compressor", ["topk:ratio=4", "qsgd"])
def test_workers_come_and_go_while_tensors_are_cut_into_slices(daemons: Daemons, compressor: str) -> None:
    """Slices change all the time; some tensors have fewer elements than slices."""
    server = small_job(
        daemons,
        *("--lease-seconds", "1", "--epochs", "10", "--mode", "sync:redundancy=4"),
        workers=4,
        task=f"{COMING_AND_GOING},width=3",
    )
    workers = daemons.workers(server, 4, "--compressor", compressor)
    poll(lambda: asked(server).version > 3, "no progress")
    workers[0].signal(signal.SIGKILL)
    server.wait_for("computes its part of version")
    late = [daemons.worker(server.address, "--worker-id", f"late{i}") for i in range(2)]
    late[1].wait_for("connected as rank")
    workers[1].signal(signal.SIGTERM)
    assert workers[1].wait() == 143
    workers[1].wait_for("leaving, all residuals pushed")
    reply = finished(server)
    assert [worker.wait() for worker in (*workers[2:], *late)] == [0] * 4
    assert reply.epoch == 10
    assert reply.repeated_samples == 0


# ---- codes


@pytest.mark.parametrize(("workers", "stragglers"), [(4, 1), (5, 2)])
def test_a_coded_job_comes_to_the_parameters_of_a_plain_one(
    daemons: Daemons, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int, stragglers: int
) -> None:
    """The parameters are those of plain SGD on the same batches, independent of late workers: to 1e-4 of each
    parameter."""
    output, batches = tmp_path / "model", tmp_path / "batches"
    task = f"{SMALL}:dropout=0,jitter=0.03"
    server = daemons.server(
        *("--task", task, "--min-workers", str(workers), "--mode", f"sync:stragglers={stragglers}"),
        *("--epochs", "4", "--batch-size", "8", "--seed", "3", "--output", str(output)),
        program=("batches_server", str(batches)),
    )
    started = daemons.workers(server, workers, "--compressor", "none")
    reply = finished(server)
    assert [worker.wait() for worker in started] == [0] * workers
    assert (reply.epoch, reply.repeated_samples) == (4, 0)
    rounds = [json.loads(line) for line in batches.read_text().splitlines()]
    assert len(rounds) == reply.version
    monkeypatch.syspath_prepend(str(TASKS))
    found = load_file(output)
    for name, parameter in replayed(task, rounds).items():
        torch.testing.assert_close(found[name], parameter, rtol=1e-4, atol=1e-6)


def replayed(task: str, rounds: list[tuple[int, list[tuple[int, int]]]]) -> dict[str, torch.Tensor]:
    """Plain SGD on these batches."""
    loaded = load(task)
    torch.manual_seed(3)
    model = loaded.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch, ranges in rounds:
        order = epoch_order(3, epoch, loaded.train_samples)
        indices = np.concatenate([order[start : start + count] for start, count in ranges])
        optimizer.zero_grad()
        torch.autograd.backward(loaded.loss(model, loaded.batch(indices)))
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def test_as_many_as_the_code_allows_may_be_killed(daemons: Daemons) -> None:
    """The rate falls to nothing, so that the accuracies are of runs that have settled: in the middle of one,
    they change by hundredths with whoever is left out of a round."""
    arguments = (
        *("--task", "small_tasks:slow_digits:slow=0.005", "--epochs", "10", "--seed", "1"),
        *("--learning-rate", "0.5", "--schedule", "cosine"),
    )
    accuracies: list[float] = []
    for kills in (0, 2):
        server = daemons.server(*arguments, "--min-workers", "5", "--mode", "sync:stragglers=2")
        started = daemons.workers(server, 5, "--compressor", "none")
        poll(partial(progressed, server), "no progress")
        for victim in started[:kills]:
            victim.signal(signal.SIGKILL)
        reply = finished(server)
        assert [worker.wait() for worker in started[kills:]] == [0] * (5 - kills)
        assert reply.repeated_samples == 0
        accuracies.append(accuracy(reply))
    assert accuracies[1] > accuracies[0] - 0.01


def test_a_slow_worker_does_not_hold_up_coded_rounds(daemons: Daemons) -> None:
    server = small_job(
        daemons, "--mode", "sync:stragglers=1", "--epochs", "8", workers=3, task=f"{PACED}:seconds=0.002"
    )
    workers = [
        daemons.worker(
            server.address,
            *("--worker-id", f"w{index}", "--compressor", "none"),
            environ={"SLOWER": "10" if index == 2 else "1"},
        )
        for index in range(3)
    ]
    reply = finished(server)
    assert [worker.wait() for worker in workers] == [0, 0, 0]
    assert reply.refused_pushes > 0
    workers[2].wait_for(r"push \d+ was not needed: another worker has pushed its gradient")
    assert reply.epoch == 8
    assert reply.repeated_samples == 0


def test_workers_come_and_go_in_coded_rounds(daemons: Daemons) -> None:
    """More are lost at a time than the code does without."""
    server = small_job(
        daemons,
        *("--lease-seconds", "1", "--epochs", "10", "--mode", "sync:stragglers=1"),
        workers=4,
        task=COMING_AND_GOING,
    )
    workers = daemons.workers(server, 4, "--compressor", "none")
    poll(lambda: asked(server).version > 3, "no progress")
    for victim in workers[:2]:
        victim.signal(signal.SIGKILL)
    late = daemons.worker(server.address, "--worker-id", "late", "--compressor", "none")
    late.wait_for("connected as rank")
    workers[2].signal(signal.SIGTERM)
    assert workers[2].wait() == 143
    reply = finished(server)
    assert [worker.wait() for worker in (workers[3], late)] == [0, 0]
    assert reply.epoch == 10
    assert reply.repeated_samples == 0
