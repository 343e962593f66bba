"""A script that adds up the gradients of several batches for one optimizer step, and the same in plain torch.

`script_accumulates BATCHES KIND ...`: BATCHES for one step; KIND says what becomes of the rest at the
end of an epoch, `last` for a step of fewer batches, `carried` for gradients that the next epoch adds to. The
rest is options of gradwire.connect.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import gradwire

SAMPLES, RATE = 88, 0.1  # batches of 8: 11 of one worker in an epoch, 6 of each of two
Scheduler = torch.optim.lr_scheduler.LRScheduler


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(SAMPLES, 6, generator=generator)
    return TensorDataset(inputs, inputs @ torch.randn(6, 2, generator=generator))


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Linear(6, 2)


def schedule_of(optimizer: Any) -> Scheduler:
    """Rates that differ at each step."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def run_epoch(
    batches: Any, model: nn.Module, optimizer: Any, schedule: Scheduler, take: int, kind: str, **how: Any
) -> list[float]:
    """Train on the batches of an epoch, and return the learning rate of each optimizer step."""
    rates: list[float] = []
    for i, (inputs, targets) in enumerate(batches):
        due = (i + 1) % take == 0 or (kind == "last" and i + 1 == len(batches))
        context = contextlib.nullcontext() if due or "no_sync" not in how else how["no_sync"]()
        if pause := float(os.environ.get("SLOW", "0")):
            time.sleep(pause)
            say(message=f"batch {i + 1}")
        with context:
            loss = mse_loss(model(inputs), targets) / take
            loss.backward()
        how.get("log", print)(loss=loss * take)
        if due:
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return rates


def parameters(model: nn.Module) -> list[float]:
    values: Any = torch.cat([each.detach().reshape(-1) for each in model.parameters()])
    return list(values.tolist())


def plain(epochs: Iterable[list[Any]], take: int, kind: str) -> tuple[list[float], list[float]]:
    """Train without Gradwire on batches; return the rate of each optimizer step, and the parameters."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    schedule, rates = schedule_of(optimizer), list[float]()

    def unheard(**_: Any) -> None:
        pass

    for batches in epochs:
        rates += run_epoch(batches, model, optimizer, schedule, take, kind, log=unheard)
    return rates, parameters(model)


def say(**fields: Any) -> None:
    print(json.dumps(fields), file=sys.stderr, flush=True)


def main() -> None:
    torch.set_num_threads(1)
    take, kind, *options = sys.argv[1:]
    words: dict[str, Any] = dict(
        zip((each[2:].replace("-", "_") for each in options[::2]), options[1::2], strict=True)
    )
    if state := os.environ.get("STATE"):
        words["state"] = state
    declared = int(os.environ.get("DECLARED", "0"))
    model = network()
    own = torch.optim.SGD(model.parameters(), lr=RATE)
    rates, lengths, totals, left = list[float](), list[tuple[int, int]](), list[int](), list[bool]()
    with gradwire.connect(**words) as job:
        model, optimizer = job.attach(model, own)
        schedule = job.follow(schedule_of(optimizer))
        how: dict[str, Any] = {"no_sync": job.no_sync} if "NO_SYNC" in os.environ else {}
        training = data()
        for epoch in job.epochs():
            batches = job.batches(training, accumulate=declared)
            totals += [job.total_steps] if declared else []
            lengths.append((epoch, len(batches)))
            rates += run_epoch(batches, model, optimizer, schedule, int(take), kind, log=job.log, **how)
            left.append(any(each.grad is not None for each in model.parameters()))
            say(message=f"epoch {epoch} ends")
    say(
        message="trained",
        rates=rates,
        lengths=lengths,
        totals=totals,
        left=left,
        version=job.version,
        parameters=parameters(model),
    )


if __name__ == "__main__":
    main()
