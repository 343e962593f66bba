"""Coded mode with real processes: the same bits as without coding, whatever happens on the way."""

from __future__ import annotations

import random
import signal
import time
from math import comb
from pathlib import Path

import numpy as np
import pytest
import torch
from daemons import Daemon, Daemons, Server
from relay import Plan, Relay, troubled
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]
from test_training import finished

from gradwire.coded.arithmetic import from_fixed_point, to_fixed_point
from gradwire.proto.messages import StatusResponse
from gradwire.proto.shares import share
from gradwire.worker.tasks import load
from gradwire.worker.training.sharding import epoch_order

ELEMENTS = 64 * 256 + 256 + 256 * 128 + 128 + 128 * 10 + 10  # of the model for digits
SAMPLES = 1408
SEED = 3
SCHEMES = "gradwire.benchmarks.schemes"


def coded_job(
    daemons: Daemons, *arguments: str, workers: int = 4, epochs: int = 15, scheme: str = "coded"
) -> Server:
    program = ("gradwire.server.cli",) if scheme == "coded" else (SCHEMES, scheme, "server")
    return daemons.server(
        *("--mode", "coded", "--seed", str(SEED), "--epochs", str(epochs), "--min-workers", str(workers)),
        *("--lease-seconds", "20", *arguments),
        program=program,
    )


def ended(server: Server, workers: list[Daemon]) -> StatusResponse:
    server.wait_for("the job is finished", timeout_s=180)
    reply = finished(server)
    assert [worker.wait() for worker in workers] == [0] * len(workers)
    return reply


def reference(workers: int, redundancy: int, epochs: int, momentum: float) -> dict[str, torch.Tensor]:
    """Synchronous SGD in one process: each block's gradients summed in fixed point, then all blocks."""
    torch.set_num_threads(1)
    task = load("digits")
    torch.manual_seed(SEED)
    model = task.model()
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=momentum)
    blocks = comb(workers, redundancy)
    for epoch in range(epochs):
        order = epoch_order(SEED, epoch, task.train_samples)
        for start in range(0, len(order), 32 * workers):
            batch = order[start : start + 32 * workers]
            total = np.zeros(ELEMENTS, np.int64)
            for block in range(blocks):
                first, last = share(len(batch), block, blocks)
                if first == last:
                    continue
                optimizer.zero_grad()
                torch.autograd.backward(task.loss(model, task.batch(batch[first:last])))
                flat = np.concatenate([p.grad.reshape(-1).numpy() for p in parameters if p.grad is not None])
                words = np.empty(ELEMENTS, np.uint32)
                to_fixed_point(flat, words, float(last - first))
                total += words.view(np.int32)
            mean = np.empty(ELEMENTS, np.float32)
            from_fixed_point(total, mean, 1 / len(batch))
            at = 0
            for parameter in parameters:
                size = parameter.numel()
                parameter.grad = torch.from_numpy(mean[at : at + size].copy()).view(parameter.shape)
                at += size
            optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.timeout(400)
def test_a_whole_training_ends_at_the_bits_of_synchronous_sgd(daemons: Daemons, tmp_path: Path) -> None:
    optimizer, epochs = ("--optimizer", "sgd:momentum=0.5"), 6
    versions = epochs * SAMPLES // 128
    found: dict[str, str] = {}
    for scheme in ("coded", "unicast"):
        output = tmp_path / f"{scheme}.safetensors"
        server = coded_job(
            *(daemons, "--mode", "coded:redundancy=2", "--output", str(output), *optimizer),
            epochs=epochs,
            scheme=scheme,
        )
        if scheme == "coded":
            workers = daemons.workers(server, 4)
        else:
            first = f"{scheme} worker"
            workers = daemons.programs(SCHEMES, first, server.address, count=4)
        reply = ended(server, workers)
        found[scheme] = reply.parameters_sha256
        assert (reply.version, reply.epoch) == (versions, epochs)
        assert reply.evaluations[-1].metrics["accuracy"] > 0.8
        # What the formula says, in packets whose slices are padded to whole elements.
        blocks = comb(4, 3) * 3 / 2 if scheme == "coded" else 3 * comb(4, 2)
        # Parameters and momentum, at the start and after each epoch.
        initial_and_copies = 2 * 4 * ELEMENTS * (1 + epochs)
        assert reply.traffic.payload_bytes_up == pytest.approx(versions * blocks * 4 * ELEMENTS, rel=1e-4)
        assert reply.traffic.raw_bytes_up == pytest.approx(
            reply.traffic.payload_bytes_up + initial_and_copies, rel=1e-6
        )
        assert reply.traffic.wire_bytes_up < 1.01 * reply.traffic.raw_bytes_up
        assert "uncoded instead" not in server.log
    assert found["coded"] == found["unicast"]
    same_bits(tmp_path / "coded.safetensors", reference(4, 2, epochs, 0.5))


def same_bits(output: Path, expected: dict[str, torch.Tensor]) -> None:
    trained = load_file(output)
    assert trained.keys() == expected.keys()
    for name, parameter in expected.items():
        assert torch.equal(trained[name], parameter), name


@pytest.mark.timeout(240)
def test_damaged_packets_lead_to_an_uncoded_exchange_and_the_same_bits(
    daemons: Daemons, tmp_path: Path
) -> None:
    output = tmp_path / "model.safetensors"
    server = coded_job(daemons, "--mode", "coded:redundancy=2", "--output", str(output), workers=3, epochs=2)
    workers = daemons.workers(server, 2)
    workers.append(daemons.program("damaging_worker", "5", server.address, "--worker-id", "w2"))
    reply = ended(server, workers)
    assert server.log.count("sent again, uncoded") >= 4
    assert "crc32c" in server.log
    assert reply.lost == ()
    same_bits(output, reference(3, 2, 2, 0.0))


@pytest.mark.timeout(240)
def test_packets_of_many_chunks_that_are_damaged_break_no_stream(daemons: Daemons) -> None:
    """Others are still on their way when an exchange is given up."""
    digests: list[str] = []
    for damaged in (True, False):
        task = (
            "--task",
            "small_tasks:regression:width=60000",
            "--batch-size",
            "8",
            "--mode",
            "coded:redundancy=2",
        )
        server = coded_job(daemons, *task, "--mode", "coded:redundancy=2", workers=3, epochs=2)
        workers = daemons.workers(server, 2)
        if damaged:
            workers.append(daemons.program("damaging_worker", "11", server.address, "--worker-id", "w2"))
        else:
            workers.append(daemons.worker(server.address, "--worker-id", "w2"))
        reply = ended(server, workers)
        assert ("sent again, uncoded" in server.log) is damaged
        assert "lost its stream" not in server.log
        assert not any("cannot" in worker.log or "again in" in worker.log for worker in workers)
        digests.append(reply.parameters_sha256)
    assert digests[0] == digests[1]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("nan", ["0", "0.2"])
def test_blocks_that_come_out_differently_are_noticed_and_replicas_stay_equal(
    daemons: Daemons, nan: str
) -> None:
    task = ("--task", f"small_tasks:unseeded:nan={nan}", "--batch-size", "8")
    server = coded_job(daemons, *task, "--mode", "coded:redundancy=2", workers=3, epochs=4)
    reply = ended(server, daemons.workers(server, 3))
    assert (reply.version, reply.lost) == (16, ())
    assert "computed different gradients of block" in server.log
    assert "the replicas of" not in server.log
    assert reply.uncoded_exchanges == 16 if nan == "0" else 0 < reply.uncoded_exchanges <= 16


@pytest.mark.timeout(240)
def test_connections_that_break_lead_to_the_same_bits(daemons: Daemons, tmp_path: Path) -> None:
    output = tmp_path / "model.safetensors"
    optimizer = ("--optimizer", "sgd:momentum=0.5")
    # Slow steps instead of many: time for several cuts on a fast machine, too, and little CPU.
    task = ("--task", "small_tasks:slow_digits:slow=0.02")
    server = coded_job(
        daemons, *task, *("--mode", "coded:redundancy=2", "--output", str(output), *optimizer), epochs=7
    )
    relay = Relay(server.port)
    try:
        workers = daemons.workers(server, 2)
        workers += [daemons.worker(f"127.0.0.1:{relay.port}", "--worker-id", f"w{i}") for i in (2, 3)]
        server.wait_for("after 1 epoch,")
        cuts = 0
        while not any("after 6 epochs," in text for text in server.messages):
            cuts += relay.cut()
            time.sleep(0.7)
        assert cuts > 1
        reply = ended(server, workers)
    finally:
        relay.close()
    assert reply.lost == ()
    same_bits(output, reference(4, 2, 7, 0.5))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
def test_coded_exchanges_over_bad_links_leave_the_bits_of_calm_ones(
    daemons: Daemons, tmp_path: Path, seed: int
) -> None:
    """Packets are lost, cut off, late and damaged, with their connections."""
    output = tmp_path / "model.safetensors"
    server = coded_job(
        daemons,
        *("--task", "small_tasks:slow_digits:slow=0.02", "--optimizer", "sgd:momentum=0.5"),
        *("--mode", "coded:redundancy=2", "--output", str(output), "--lease-seconds", "60"),
        epochs=7,
    )
    with troubled(server.port, Plan(seed=seed, gap_bytes=(20_000, 2_000_000), faults=30)) as relay:
        workers = [
            daemons.worker(f"127.0.0.1:{relay.port}", "--worker-id", f"w{i}", "--give-up-seconds", "60")
            for i in range(4)
        ]
        reply = ended(server, workers)
        assert reply.lost == ()
        same_bits(output, reference(4, 2, 7, 0.5))


@pytest.mark.timeout(240)
def test_killed_workers_come_back_and_the_training_goes_on(daemons: Daemons) -> None:
    arguments = ("--mode", "coded:redundancy=2", "--optimizer", "adam", "--learning-rate", "0.003")
    server = coded_job(
        *(daemons, *arguments, "--lease-seconds", "1.5", "--task", "small_tasks:slow_digits:slow=0.03"),
        epochs=10,
    )
    workers = daemons.workers(server, 4)
    server.wait_for("after 1 epoch,")
    chance = random.Random(1)
    for _ in range(3):
        index = chance.randrange(4)
        workers[index].signal(signal.SIGKILL)
        workers[index] = daemons.worker(server.address, "--worker-id", f"w{index}")
        workers[index].wait_for("connected as rank")
        time.sleep(1.0)
    reply = ended(server, workers)
    assert reply.epoch == 10
    assert reply.evaluations[-1].metrics["accuracy"] > 0.92
    assert "differ" not in server.log  # whoever came late has what the optimizer remembers, too
    assert reply.refused_pushes < 10


def test_when_everybody_is_told_to_stop_the_server_gets_a_copy(daemons: Daemons) -> None:
    task = ("--task", "small_tasks:slow_digits:slow=0.05")
    server = coded_job(daemons, *task, workers=2, epochs=4)
    workers = daemons.workers(server, 2)
    server.wait_for("after 1 epoch,")
    time.sleep(0.5)
    for worker in workers:
        worker.signal(signal.SIGTERM)
    assert [worker.wait() for worker in workers] == [128 + signal.SIGTERM] * 2
    again = daemons.workers(server, 2, "--connect-seconds", "20")
    reply = ended(server, again)
    assert reply.epoch == 4
    assert reply.lost == ()
    for text in server.messages:
        if "older, becomes version" in text:
            assert "copy, 1 version older" in text


def test_everybody_lost_goes_back_to_the_servers_copy(daemons: Daemons) -> None:
    task = ("--task", "small_tasks:slow_digits:slow=0.05")
    server = coded_job(daemons, *task, "--lease-seconds", "1.5", workers=2, epochs=6)
    workers = daemons.workers(server, 2)
    server.wait_for("after 2 epochs,")
    time.sleep(0.5)  # half an epoch, or the copy would be the current version
    for worker in workers:
        worker.signal(signal.SIGKILL)
    again = [daemons.worker(server.address, "--worker-id", f"again{i}") for i in range(2)]
    server.wait_for("the server's copy, .* are assigned again")  # as nobody has come back with the version
    reply = ended(server, again)
    assert reply.epoch == 6
    assert reply.evaluations[-1].metrics["accuracy"] > 0.8


def test_a_compressor_that_was_asked_for_is_refused(daemons: Daemons) -> None:
    server = coded_job(daemons, workers=1, epochs=1)
    worker = daemons.worker(server.address, "--compressor", "topk:ratio=10")
    assert worker.wait() == 2
    assert "use --compressor none" in worker.log
    alone = daemons.worker(server.address)
    assert ended(server, [alone]).epoch == 1
