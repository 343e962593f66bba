"""A task of some millions of parameters, whose workers write down their peak of resident memory."""

import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from gradwire.worker.tasks import Task


def peak_bytes(pid: int | str = "self") -> int:
    """Largest resident memory of a process so far."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def large(folder: str, width: int = 16) -> Task:
    inputs = torch.randn(32, width, generator=torch.Generator().manual_seed(1))

    def batch(indices: npt.NDArray[np.int64]) -> torch.Tensor:
        (Path(folder) / str(os.getpid())).write_text(str(peak_bytes()))
        return inputs[indices]

    return Task(
        name="large",
        train_samples=32,
        model=lambda: nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(8)]),
        batch=batch,
        loss=lambda model, batch: model(batch).square().mean(),
        evaluate=lambda model: {"loss": 0.0},
    )
