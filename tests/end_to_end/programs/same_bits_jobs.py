"""Tasks and scripts of `same_bits.py`. They use what users may use, so that any checkout runs them."""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import gradwire
from gradwire.worker.tasks import Task

SAMPLES, BATCH = 200, 8
ODD_SAMPLES = 4  # the first ones: `plain` can make something else of batches that hold one of them
ODD_STEP = 16  # a compressor knows by then how large gradients usually are
Batch = tuple[torch.Tensor, torch.Tensor]


def data(samples: int = SAMPLES) -> TensorDataset:
    """A noisy linear problem."""
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(samples, 32, generator=generator)
    noise = 0.1 * torch.randn(samples, 8, generator=generator)
    return TensorDataset(inputs, inputs @ torch.randn(32, 8, generator=generator) / 4 + noise)


def network(dropout: float = 0.1) -> nn.Module:
    """A model whose matrices are cut into several parts of 4096 elements, and whose biases stay small."""
    hidden = (nn.Linear(32, 256), nn.Tanh(), nn.Dropout(dropout), nn.Linear(256, 48), nn.Tanh())
    return nn.Sequential(*hidden, nn.Linear(48, 8))


def _task(
    name: str,
    model: Callable[[], nn.Module],
    groups: Callable[[nn.Module], list[dict[str, Any]]] | None = None,
    change: Callable[[torch.Tensor], torch.Tensor] | None = None,
    samples: int = SAMPLES,
) -> Task:
    """Return a task whose batches end with the samples' numbers. change: of the loss, by these numbers."""
    inputs, targets = data(samples).tensors

    def batch(indices: npt.NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return inputs[indices], targets[indices], torch.from_numpy(indices)

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
        found = mse_loss(model(batch[0]), batch[1])
        return found if change is None else found * change(batch[2])

    def evaluate(model: nn.Module) -> Mapping[str, float]:
        return {"loss": float(mse_loss(model(inputs), targets))}

    optional: dict[str, Any] = {} if groups is None else {"groups": groups}
    return Task(
        name=name, train_samples=samples, model=model, batch=batch, loss=loss, evaluate=evaluate, **optional
    )


def plain(factor: float = 1.0, slow: float = 0.0, dropout: float = 0.1) -> Task:
    """
    Args:
        factor: what the loss of a batch with one of `ODD_SAMPLES` is multiplied with, from a worker's
            `ODD_STEP` on.
        slow: seconds of delay per step.
    """
    steps = itertools.count(1)

    def change(numbers: torch.Tensor) -> torch.Tensor:
        time.sleep(slow)
        odd = next(steps) >= ODD_STEP and bool((numbers < ODD_SAMPLES).any())
        return torch.tensor(factor if odd else 1.0)

    return _task("plain", lambda: network(dropout), change=change)


class Unusual(nn.Module):
    """BatchNorm, a frozen layer, a weight that two layers share, one layer that no loss reaches, and one that
    only some batches reach."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(32, 64).requires_grad_(False)
        self.norm = nn.BatchNorm1d(64)
        self.inner = nn.Linear(64, 64)
        self.again = nn.Linear(64, 64)
        self.again.weight = self.inner.weight
        self.unreached = nn.Linear(64, 64)
        self.sometimes = nn.Linear(64, 64)
        self.last = nn.Linear(64, 8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.inner(self.norm(self.frozen(inputs))))
        if inputs[0, 0] > 0:
            hidden = hidden + torch.tanh(self.sometimes(hidden))
        found: torch.Tensor = self.last(torch.tanh(self.again(hidden)))
        return found


def unusual_groups(model: nn.Module) -> list[dict[str, Any]]:
    trained = [each for each in model.parameters() if each.requires_grad]
    last = model.get_parameter("last.weight")
    small = [each for each in trained if each.dim() < 2]
    return [{"params": small, "weight_decay": 0.0}, {"params": [last], "lr": 0.02}]


def unusual() -> Task:
    return _task("unusual", Unusual, unusual_groups)


class Turns:
    """Two workers that never compute at the same time, each a whole step after the other, so that the pushes
    of modes without rounds have one order.

    A worker begins its step once the other has begun its next one: what it has pushed is in the parameters
    then. The one whose first batch has the smaller sample is the first. Both write down what they begin in a
    folder, TURNS in the environment.
    """

    def __init__(self, steps: int) -> None:
        """steps: of both workers together."""
        self._folder, self._steps = Path(os.environ["TURNS"]), steps
        self._mine = self._folder / str(os.getpid())
        self._begun: list[int] = []  # the first sample of each of my steps

    def wait(self, numbers: torch.Tensor) -> torch.Tensor:
        """Wait until it is this worker's turn; return 1."""
        self._begun.append(int(numbers[0]))
        written = self._mine.with_suffix(".new")
        written.write_text(" ".join(map(str, self._begun)))
        written.rename(self._mine)
        while not self._is_mine():
            time.sleep(0.002)
        return torch.ones(())

    def _is_mine(self) -> bool:
        others = [each for each in self._folder.iterdir() if each.name.isdigit() and each != self._mine]
        if not others:
            return False
        (other,) = ([int(number) for number in each.read_text().split()] for each in others)
        first = self._begun[0] < other[0]
        last = len(self._begun) + len(other) == self._steps  # nobody begins another one
        return last or len(other) >= len(self._begun) + (0 if first else 1)


def turns(steps: int = 24) -> Task:
    """The plain task, for one epoch in batches of `BATCH`. steps: of both workers together."""
    return _task("turns", network, change=Turns(steps).wait, samples=BATCH * steps)


def hanging() -> Task:
    """The plain task. A worker with HANGS in its environment hangs in its first step."""

    def change(numbers: torch.Tensor) -> torch.Tensor:
        while "HANGS" in os.environ:
            time.sleep(1)
        return torch.ones(())

    return _task("hanging", network, change=change)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    matrices = [each for each in model.parameters() if each.dim() > 1]
    biases = [each for each in model.parameters() if each.dim() == 1]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": 1e-3},
        {"params": biases, "lr": 0.02},
    ]
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


def script_gradients() -> None:
    """Groups, momentum, a schedule, accumulation, and a batch that it does without."""
    torch.manual_seed(3)
    model = network()
    optimizer = _sgd(model)
    with gradwire.connect() as job:
        model, step = job.attach(model, optimizer)
        torch.manual_seed(10 + job.rank)
        schedule = job.follow(torch.optim.lr_scheduler.ExponentialLR(step, 0.98))
        passed_over = False
        for _ in job.epochs():
            for inputs, targets in job.batches(data()):
                time.sleep(0.02)  # so that there is time to stop it
                step.zero_grad()
                half = len(inputs) // 2
                if job.version == 12 and job.rank == 0 and not passed_over:
                    passed_over = True
                    continue
                if half:
                    with job.no_sync():
                        (mse_loss(model(inputs[:half]), targets[:half]) / 2).backward()
                loss = mse_loss(model(inputs[half:]), targets[half:]) / (2 if half else 1)
                job.log(loss=loss)
                loss.backward()
                step.step()
                schedule.step()


def script_plain() -> None:
    """The simplest loop. Its gradients leave during the backward pass."""
    torch.manual_seed(3)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    with gradwire.connect() as job:
        model, step = job.attach(model, optimizer)
        torch.manual_seed(10 + job.rank)
        for _ in job.epochs():
            for inputs, targets in job.batches(data()):
                mse_loss(model(inputs), targets).backward()
                step.step()
                step.zero_grad()


def script_clipped() -> None:
    """A loader of its own, and clipping at the server."""
    torch.manual_seed(3)
    model = network()
    with gradwire.connect() as job:
        model, step = job.attach(model, _sgd(model), clip_norm=0.5)
        torch.manual_seed(10 + job.rank)
        order = torch.Generator().manual_seed(20 + job.rank)
        loader = DataLoader(data(), batch_size=BATCH, shuffle=True, generator=order)
        for _ in job.epochs():
            for inputs, targets in job.steps(loader):
                step.zero_grad()
                mse_loss(model(inputs), targets).backward()
                step.step()


def script_overflowing() -> None:
    """A GradScaler, one of whose steps overflows."""
    torch.manual_seed(3)
    model = network()
    with gradwire.connect() as job:
        model, step = job.attach(model, _sgd(model))
        torch.manual_seed(10 + job.rank)
        scaler: Any = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for epoch in job.epochs():
            for number, (inputs, targets) in enumerate(job.batches(data())):
                overflows = epoch == 0 and number == 2 and job.rank == 1
                loss = mse_loss(model(inputs), targets) * (math.inf if overflows else 1.0)
                scaler.scale(loss).backward()
                scaler.step(step)
                scaler.update()
                step.zero_grad()


def script_local() -> None:
    """Steps of an optimizer that the server does not run."""
    torch.manual_seed(3)
    model = network()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.002)
    with gradwire.connect() as job:
        model, step = job.attach(model, optimizer, steps="local")
        torch.manual_seed(10 + job.rank)
        for _ in job.epochs():
            for inputs, targets in job.batches(data()):
                loss = mse_loss(model(inputs), targets)
                job.log(loss=loss)
                step.zero_grad()
                loss.backward()
                step.step()
