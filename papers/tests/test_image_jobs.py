"""Image tasks with real processes: the mathematics of one process, and files that cannot be used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]

from gradwire import load_task
from gradwire_papers.image_files import CIFAR10, synthetic

IMAGES, BATCH, WORKERS, SEED = 2000, 125, 2, 3


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with 2,000 training images and 200 for validation in the published format."""
    folder = tmp_path / "cifar10"
    folder.mkdir()
    for name, content in synthetic(CIFAR10, IMAGES, seed=0):
        (folder / name).write_bytes(content)
    validation = b"".join(content for _, content in synthetic(CIFAR10, 200, seed=1))
    (folder / "test_batch.bin").write_bytes(validation)
    return folder


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).parent / "gc-run"
    command = [program, "--workers", str(WORKERS), "--no-baseline", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_resnet20_reaches_the_loss_of_one_process(files: Path, tmp_path: Path) -> None:
    """Batch normalization takes the statistics of each worker's batch, here and in the process beside it."""
    task = f"cifar10:data={files},augment=off"
    done = run(
        *("--task", task, "--epochs=1", f"--seed={SEED}", f"--batch-size={BATCH}", "--compressor=none"),
        *("--learning-rate=0.05", "--out", tmp_path / "out"),
    )
    assert done.returncode == 0, done.stderr
    (output,) = (tmp_path / "out").rglob("*.safetensors")

    made = load_task(task)
    torch.manual_seed(SEED)
    model = made.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    order, losses = np.random.default_rng([SEED, 0]).permutation(IMAGES), list[float]()
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


def test_a_damaged_file_ends_the_run_before_anything_is_trained(files: Path, tmp_path: Path) -> None:
    path = files / "data_batch_3.bin"
    path.write_bytes(path.read_bytes()[:-100])
    done = run("--task", f"cifar10:data={files}", "--epochs=1", "--out", tmp_path / "out")
    assert done.returncode == 6
    assert f"{path}: at byte 1226127: expected records of 3073 bytes, got 2973 bytes" in done.stderr
