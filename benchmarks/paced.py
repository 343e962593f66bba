"""Tasks with emulated computation: sleeping, so that processes that share cores do not slow each other down.

As a program it is a gc-worker that sleeps longer by a factor: `python -m gradwire.benchmarks.paced 10
--server …`
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
import time
from typing import Any

import torch

from ..worker.tasks import Task, load

slower = 1.0  # factor of all times that this process sleeps; `main` sets it


def digits(seconds: float = 0.001) -> Task:
    """Return the digits task, with this many seconds of sleep added per sample."""
    task = load("digits")

    def loss(network: torch.nn.Module, batch: Any) -> torch.Tensor:
        time.sleep(seconds * slower * len(batch[0]))
        return task.loss(network, batch)

    return dataclasses.replace(task, loss=loss)


def still(elements: int = 250_000, seconds: float = 0.01, samples: int = 1024) -> Task:
    """Return a task whose model learns nothing, and which sleeps this many seconds for each sample."""

    class Still(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1, elements))  # a matrix: vectors are not compressed

    def loss(network: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        time.sleep(seconds * slower * len(batch))
        weight: torch.Tensor = network.weight  # type: ignore[assignment]
        return weight.sum() * 1e-3

    return Task(
        name="still",
        train_samples=samples,
        model=Still,
        batch=lambda indices: torch.from_numpy(indices),
        loss=loss,
        evaluate=lambda network: {"loss": 0.0},
    )


def main(arguments: list[str]) -> int:
    """Run a gc-worker that sleeps longer by a factor, the first argument; return its exit code."""
    from ..worker.cli import main as gc_worker

    # Imported by name: run as a program, this module is `__main__`, and the task uses another copy of it.
    module: Any = importlib.import_module("gradwire.benchmarks.paced")
    module.slower = float(arguments[0])
    return gc_worker(arguments[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
