"""A script that keeps things: `script_keeps LOOP ...`, where the rest is options of gradwire.connect.

Dropout, a loader that shuffles, a running mean of the parameters, and numbers of its own all depend on how
the script went on before; in the end it says what became of them.
"""

from __future__ import annotations

import random
import sys
import time
from typing import Any

import numpy as np
import torch
from script_loops import data, say
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

import gradwire

STEP_S = 0.06  # so that a busy machine can stop the job before its end


class Average:
    """Moving average of a model's parameters, as many scripts keep one."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._mean = [each.detach().clone() for each in model.parameters()]

    def update(self) -> None:
        for mean, each in zip(self._mean, self._model.parameters(), strict=True):
            mean.lerp_(each.detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self._mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for mean, each in zip(self._mean, state["mean"], strict=True):
            mean.copy_(each)


def main(loop: str, *options: str) -> int:
    torch.set_num_threads(1)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 4))
    given: dict[str, Any] = dict(
        zip((each[2:].replace("-", "_") for each in options[::2]), options[1::2], strict=True)
    )
    with gradwire.connect(**given) as job:
        torch.manual_seed(10 + job.rank)
        random.seed(10 + job.rank)
        np.random.seed(10 + job.rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        network, step = job.attach(model, optimizer, steps="local" if loop == "local" else "server")
        scheduler = job.follow(torch.optim.lr_scheduler.ExponentialLR(step, 0.98))
        average = job.state["average"] = Average(model)
        drawn: float = job.state.get("drawn", 0.0)
        generator = torch.Generator().manual_seed(20 + job.rank)
        loader = DataLoader(data(), batch_size=8, shuffle=True, generator=generator)
        for _ in job.epochs():
            for inputs, targets in job.batches(data()) if loop == "batches" else job.steps(loader):
                time.sleep(STEP_S)
                loss = mse_loss(network(inputs), targets)
                step.zero_grad()
                loss.backward()
                step.step()
                scheduler.step()
                average.update()
                drawn += random.random() + np.random.random()
                job.state["drawn"] = drawn
        mean = torch.cat([each.flatten() for each in average.state_dict()["mean"]])
        say("trained", drawn=drawn, mean=mean.tolist(), rate=step.param_groups[0]["lr"])
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
