"""Every mode with real processes: what it promises, slow workers, and workers that come and go."""

from __future__ import annotations

import pickle
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from daemons import TASKS, Daemon, Daemons, Server, asked, poll
from relay import Relay
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]
from test_training import SMALL, finished, small_job

from gradwire.proto import messages as m
from gradwire.worker.tasks import load
from gradwire.worker.training.sharding import epoch_order

MODES: dict[str, tuple[str, ...]] = {
    "sync": (),
    "sync, backup 1": ("--mode", "sync:backup=1"),
    "stale": ("--mode", "stale:bound=2"),
    "async": ("--mode", "async:rate=inverse,compensation=0.1"),
    "local": ("--mode", "local:first=2,most=4"),
    "local, delayed": ("--mode", "local:first=2,most=4,delayed=on"),
}
PACED = "small_tasks:paced"
# Ten epochs of it last long enough to come and go in, by slow steps and not by many, which would cost CPU.
COMING_AND_GOING = f"{SMALL}:slow=0.1,samples=160"


# ---- the same mathematics


def plain_sgd(epochs: int, batch_size: int, rate: float) -> dict[str, torch.Tensor]:
    """The small task, trained by a loop that anybody would write."""
    task = load(f"{SMALL}:dropout=0")
    torch.manual_seed(3)
    model = task.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for epoch in range(epochs):
        order = epoch_order(3, epoch, task.train_samples)
        for start in range(0, task.train_samples, batch_size):
            optimizer.zero_grad()
            torch.autograd.backward(task.loss(model, task.batch(order[start : start + batch_size])))
            optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("mode", ["async", "stale"])
def test_one_worker_is_plain_sgd_to_the_bit(
    daemons: Daemons, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.syspath_prepend(str(TASKS))
    output = tmp_path / "model.safetensors"
    server = small_job(
        daemons, *("--mode", mode, "--output", str(output)), workers=1, task=f"{SMALL}:dropout=0"
    )
    (worker,) = daemons.workers(server, 1, "--compressor", "none")
    finished(server)
    assert worker.wait() == 0
    trained = load_file(output)
    for name, expected in plain_sgd(2, 8, 0.1).items():
        assert torch.equal(trained[name], expected), name


def test_one_local_step_and_plain_averaging_is_sync_sgd(daemons: Daemons, tmp_path: Path) -> None:
    trained: list[dict[str, torch.Tensor]] = []
    for name, arguments in {"sync": (), "local": ("--mode", "local:steps=1")}.items():
        output = tmp_path / f"{name}.safetensors"
        server = small_job(daemons, *arguments, "--output", str(output), workers=3, task=f"{SMALL}:dropout=0")
        workers = daemons.workers(server, 3, "--compressor", "none")
        reply = finished(server)
        assert [worker.wait() for worker in workers] == [0, 0, 0]
        assert reply.version == 8
        trained.append(load_file(output))
    for name, parameter in trained[0].items():
        torch.testing.assert_close(trained[1][name], parameter, rtol=1e-5, atol=1e-6)


def test_local_steps_need_fewer_rounds_and_say_how_many(daemons: Daemons) -> None:
    server = small_job(daemons, *("--mode", "local:steps=3"), workers=2)
    workers = daemons.workers(server, 2)
    reply = finished(server)
    assert [worker.wait() for worker in workers] == [0, 0]
    # 96 samples: two rounds of 2 workers x 3 steps x 8 samples, in each of two epochs.
    assert (reply.version, reply.local_steps) == (4, 12)


def test_steps_that_begin_early_repeat_to_the_bit_and_learn_as_much(daemons: Daemons, tmp_path: Path) -> None:
    found: list[tuple[float, dict[str, torch.Tensor]]] = []
    for name, delayed in (("first", "on"), ("second", "on"), ("plain", "off")):
        output = tmp_path / f"{name}.safetensors"
        server = daemons.server(
            *("--task", "digits", "--min-workers", "2", "--epochs", "6", "--batch-size", "8", "--seed", "2"),
            *("--mode", f"local:steps=8,delayed={delayed}", "--output", str(output)),
        )
        workers = daemons.workers(server, 2)
        reply = finished(server)
        assert [worker.wait() for worker in workers] == [0, 0]
        assert reply.repeated_samples == 0
        found.append((reply.evaluations[-1].metrics["accuracy"], load_file(output)))
    (accuracy, first), (_, second), (plain, without) = found
    assert all(torch.equal(parameter, second[name]) for name, parameter in first.items())
    assert not all(torch.equal(parameter, without[name]) for name, parameter in first.items())
    assert accuracy > 0.9
    assert abs(accuracy - plain) < 0.03


# ---- slow workers


def straggling(daemons: Daemons, *arguments: str, workers: int = 3) -> tuple[Server, list[Daemon]]:
    """A job in which the last worker takes ten times as long for each sample."""
    server = small_job(
        daemons, *("--lease-seconds", "5", *arguments), workers=workers, task=f"{PACED}:seconds=0.002"
    )
    started = [
        daemons.worker(
            server.address,
            *("--worker-id", f"w{index}"),
            environ={"SLOWER": "10" if index == workers - 1 else "1"},
        )
        for index in range(workers)
    ]
    return server, started


def test_no_applied_push_is_staler_than_the_bound(daemons: Daemons) -> None:
    server, workers = straggling(daemons, "--mode", "stale:bound=2", "--epochs", "6")
    reply = finished(server)
    assert [worker.wait() for worker in workers] == [0, 0, 0]
    assert reply.largest_staleness <= 2
    assert reply.epoch == 6
    assert reply.refused_pushes == 0
    assert reply.repeated_samples == 0


def test_a_slow_worker_does_not_hold_up_rounds_that_have_a_backup(daemons: Daemons) -> None:
    server, workers = straggling(daemons, "--mode", "sync:backup=1", "--epochs", "8")
    reply = finished(server)
    assert [worker.wait() for worker in workers] == [0, 0, 0]
    assert reply.refused_pushes > 0
    workers[-1].wait_for(r"push \d+ arrived too late; its gradient leaves with the next push")
    assert reply.epoch == 8
    assert reply.repeated_samples == 0


def test_async_does_not_wait_for_anybody(daemons: Daemons) -> None:
    server, workers = straggling(daemons, "--mode", "async", "--epochs", "6")
    reply = finished(server)
    assert [worker.wait() for worker in workers] == [0, 0, 0]
    assert reply.largest_staleness > 2  # two workers take ten steps each meanwhile, if they can
    assert not any("a step begins" in text for text in server.messages)


# ---- workers that come and go


@pytest.mark.parametrize("mode", MODES)
def test_workers_come_and_go_in_every_mode(daemons: Daemons, mode: str) -> None:
    """One is killed, one is told to leave, two come; every sample is trained on."""
    server = small_job(
        daemons,
        *("--lease-seconds", "1", "--epochs", "10", "--downlink", "4bit", *MODES[mode]),
        workers=2,
        task=COMING_AND_GOING,
    )
    workers = daemons.workers(server, 3, "--compressor", "topk:ratio=4")
    poll(lambda: asked(server).version > 3, "no progress")
    workers[0].signal(signal.SIGKILL)
    late = [daemons.worker(server.address, "--worker-id", f"late{i}") for i in range(2)]
    late[0].wait_for("connected as rank")
    workers[1].signal(signal.SIGTERM)
    assert workers[1].wait() == 143
    workers[1].wait_for("leaving, all residuals pushed")
    reply = finished(server)
    assert [worker.wait() for worker in (workers[2], *late)] == [0, 0, 0]
    assert reply.epoch == 10
    assert np.isfinite(reply.train_loss)


def test_a_worker_that_cannot_hand_over_in_time_says_what_is_lost(daemons: Daemons) -> None:
    server = small_job(daemons, workers=2, task=f"{SMALL}:slow=0.05,samples=960")
    workers = daemons.workers(server, 2, "--compressor", "topk:ratio=8", "--leave-seconds", "1")
    poll(lambda: asked(server).version > 3, "no progress")
    workers[1].signal(signal.SIGSTOP)  # nobody pushes, so no round closes and no work comes
    time.sleep(0.5)
    workers[0].signal(signal.SIGTERM)
    assert workers[0].wait() == 143
    workers[0].wait_for(
        r"SIGTERM: leaving after 1 s; residuals of norm [\d.e-]+ are lost, and \d pushes are unconfirmed"
    )
    workers[1].signal(signal.SIGCONT)
    assert finished(server).epoch == 2


def test_a_worker_that_leaves_does_not_wait_for_a_server_that_is_away(daemons: Daemons) -> None:
    server = small_job(daemons, workers=1, task=f"{SMALL}:slow=0.05,samples=9600")
    worker = daemons.workers(server, 1, "--compressor", "topk:ratio=8", "--give-up-seconds", "100")[0]
    poll(lambda: asked(server).version > 3, "no progress")
    server.signal(signal.SIGKILL)
    server.wait()
    worker.wait_for("waiting for a gc-server")
    began = time.monotonic()
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 143
    assert time.monotonic() - began < 10  # of the 20 that it has
    worker.wait_for(
        r"SIGTERM: leaving while the server has been away for \d s; residuals of norm [\d.e-]+ are lost"
    )


def replayed(path: Path, rate: float) -> tuple[list[np.ndarray[Any, Any]], int]:
    """The parameters that the recorded gradients come to, and how many were applied."""
    with path.open("rb") as file:
        values: list[torch.Tensor] = [torch.from_numpy(value) for value in pickle.load(file)]
        applied = 0
        while True:
            try:
                version, factor, shares = pickle.load(file)
            except EOFError:
                return [value.numpy() for value in values], applied
            given = [share for share in shares if share[0]]
            total = sum(samples for samples, _ in given)
            applied += len(shares)
            for place, value in enumerate(values):
                gradient = np.zeros(value.numel(), np.float32)
                for samples, gradients in given:
                    gradient += np.float32(samples / total) * gradients[place]
                if given:
                    value.add_(torch.from_numpy(gradient), alpha=-rate * factor)
            assert version > 0


def all_back(server: Server) -> bool:
    """Once all four take part; False when the job is over before."""
    while True:
        reply = asked(server)
        if reply.phase in (m.Phase.FINISHING, m.Phase.FINISHED):
            return False
        if sum(member.attached and member.pushes > 0 for member in reply.members) == 4:
            return True
        time.sleep(0.05)


def test_workers_that_are_killed_all_the_time_cost_nothing_that_was_acknowledged(
    daemons: Daemons, tmp_path: Path
) -> None:
    """kill -9 of a random worker again and again, with restarts: the run ends, learns as well as a calm one,
    and its applied log comes to the same bits.

    The rate falls to nothing, so that the accuracy at the end is of a run that has settled. In the middle of
    one it goes up and down by hundredths with the order of the samples, which kills change."""
    record, output = tmp_path / "record", tmp_path / "model.safetensors"
    rate = 0.5
    arguments = (
        *("--epochs", "10", "--seed", "1", "--min-workers", "4"),
        *("--learning-rate", str(rate), "--schedule", "cosine"),
    )
    calm = daemons.server("--task", "digits", *arguments)
    workers = daemons.workers(calm, 4)
    expected = finished(calm).evaluations[-1].metrics["accuracy"]
    assert [worker.wait() for worker in workers] == [0] * 4

    chance = random.Random(1)
    server = daemons.server(
        *("--task", "small_tasks:slow_digits", *arguments),
        *("--lease-seconds", "1", "--output", str(output)),
        *("--downlink", "none"),  # what is written is what the workers have, and so the server's to the bit
        program=("recording_server", str(record)),
    )
    workers = daemons.workers(server, 4)
    poll(lambda: asked(server).version > 3, "no progress")
    kills = 0
    while all_back(server):
        time.sleep(chance.uniform(0.3, 1.5))
        place = chance.randrange(4)
        workers[place].signal(signal.SIGKILL)
        workers[place].wait()
        kills += 1
        workers[place] = daemons.worker(server.address, "--worker-id", f"w{place}")
    reply = finished(server)
    values, applied = replayed(record, rate)
    trained = load_file(output)
    names = [name for name, _ in load("digits").model().named_parameters()]
    for name, value in zip(names, values, strict=True):
        assert value.tobytes() == trained[name].numpy().tobytes(), name
    assert applied == reply.pushes, "every acknowledged push is in the log once"
    assert reply.evaluations[-1].metrics["accuracy"] > expected - 0.01
    assert kills >= 3


def test_a_push_that_is_too_late_stops_on_its_way(daemons: Daemons) -> None:
    """A link on which a push takes ten seconds. The sender's buffers hold much of one, and are sent."""
    width, gradient = 300_000, 4 * 17 * 300_000
    task = f"small_tasks:regression:width={width},slow=0.01,samples=288"
    server = daemons.server(
        *("--mode", "sync:backup=1", "--task", task, "--min-workers", "3", "--batch-size", "8"),
        *("--epochs", "1", "--learning-rate", "1e-6"),
    )
    relay = Relay(server.port, up_per_s=2e6)
    workers = [daemons.worker(server.address, "--worker-id", f"w{i}", "--compressor", "none") for i in (0, 1)]
    for rank in (0, 1):  # one of them uploads the model
        server.wait_for(rf"rank {rank} \(w\d\) joined")
    late = daemons.worker(f"127.0.0.1:{relay.port}", "--worker-id", "late", "--compressor", "none")
    reply = finished(server)
    assert [worker.wait() for worker in (*workers, late)] == [0, 0, 0]
    assert reply.refused_pushes >= 1
    assert reply.repeated_samples == 0
    late.wait_for(r"push \d+ arrived too late; its gradient leaves with the next push")
    assert relay.up < (reply.refused_pushes + 1) * gradient / 3  # one was on its way as the job ended
    relay.close()
