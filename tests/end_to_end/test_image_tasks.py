"""Image tasks with real processes: the mathematics of one process, and files that cannot be used."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from daemons import Daemons, asked, poll
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]

from gradwire.common.exits import Exit
from gradwire.proto import messages as m
from gradwire.worker.tasks import load
from gradwire.worker.tasks.image_files import CIFAR10, synthetic
from gradwire.worker.training.sharding import epoch_order

IMAGES, BATCH, WORKERS, SEED = 2000, 125, 2, 3


def cifar10(folder: Path) -> Path:
    """Write 2,000 training images and 200 for validation in the published format."""
    for name, content in (*synthetic(CIFAR10, IMAGES, seed=0), ("test_batch.bin", b"")):
        (folder / name).write_bytes(content)
    validation = b"".join(content for _, content in synthetic(CIFAR10, 200, seed=1))
    (folder / "test_batch.bin").write_bytes(validation)
    return folder


def test_resnet20_reaches_the_loss_of_one_process(daemons: Daemons, tmp_path: Path) -> None:
    """Batch normalization takes the statistics of each worker's batch, here and in the process beside it."""
    task = f"cifar10:data={cifar10(tmp_path)},augment=off"
    output = tmp_path / "model.safetensors"
    server = daemons.server(
        *("--task", task, "--min-workers", str(WORKERS), "--epochs", "1", "--seed", str(SEED)),
        *("--batch-size", str(BATCH), "--learning-rate", "0.05", "--output", str(output)),
    )
    workers = daemons.workers(server, WORKERS, "--compressor", "none", "--task", task)
    assert [worker.wait() for worker in workers] == [0] * WORKERS
    poll(lambda: asked(server).phase is m.Phase.FINISHED, "the job is not finished")

    made = load(task)
    torch.manual_seed(SEED)
    model = made.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    order, losses = epoch_order(SEED, 0, IMAGES), list[float]()
    for start in range(0, IMAGES, WORKERS * BATCH):
        optimizer.zero_grad()
        for begin in range(start, start + WORKERS * BATCH, BATCH):
            loss = made.loss(model, made.batch(order[begin : begin + BATCH])) / WORKERS
            loss.backward()
            losses.append(loss.item() * WORKERS)
        optimizer.step()
    assert losses[-1] < losses[0] - 0.2  # it learns
    trained = load_file(output)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(trained[name], parameter.detach(), rtol=2e-3, atol=2e-5, msg=name)
    first = made.batch(order[:BATCH])
    with torch.no_grad():
        expected = made.loss(model, first).item()
        for name, parameter in model.named_parameters():
            parameter.copy_(trained[name])
        assert made.loss(model, first).item() == pytest.approx(expected, rel=1e-4)


def test_a_damaged_file_ends_the_worker_before_anything_is_trained(daemons: Daemons, tmp_path: Path) -> None:
    task = f"cifar10:data={cifar10(tmp_path)}"
    path = tmp_path / "data_batch_3.bin"
    path.write_bytes(path.read_bytes()[:-100])
    server = daemons.server("--task", task, "--min-workers", "1", "--epochs", "1")
    worker = daemons.worker(server.address, "--task", task)
    assert worker.wait() == Exit.TASK
    assert f"{path}: at byte 1226127: expected records of 3073 bytes, got 2973 bytes" in worker.log
    assert asked(server).version == 0
