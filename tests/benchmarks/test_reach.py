"""`gc-bench reach`: peers train as one process would, and rows are compared rightly."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gradwire.benchmarks import reach
from gradwire.benchmarks.ddp_task import Setup
from gradwire.server.job.schedule import Passed, parse_schedule
from gradwire.worker.tasks import load

TASK = "characters:characters=20000,width=32,layers=1,context=16"
STEPS = 12


def test_a_peer_trains_as_one_process_at_the_batch_of_all_ranks() -> None:
    setup = Setup(
        task=TASK,
        batch_size=4,
        optimizer="adamw:beta2=0.99,weight_decay=0.1",
        learning_rate=0.01,
        schedule="cosine:warmup=3steps",
        all_steps=STEPS,
        seed=7,
    )
    found = reach.train_peer(setup, 2, "fp32", STEPS, None)
    torch.manual_seed(7)
    task = load(TASK)
    network = task.model()
    groups = [
        {"params": [each for each in network.parameters() if each.dim() > 1], "weight_decay": 0.1},
        {"params": [each for each in network.parameters() if each.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, 0.01, (0.9, 0.99))
    order = np.random.default_rng(7).permutation(task.train_samples)
    for step in range(STEPS):
        place = Passed(epochs=0.0, steps=step + 0.5, of_job=(step + 0.5) / STEPS)
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * parse_schedule("cosine:warmup=3steps").factor(place)
        optimizer.zero_grad()
        task.loss(network, task.batch(order[8 * step : 8 * step + 8])).backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
    assert found.loss == pytest.approx(task.evaluate(network)["loss"], rel=1e-4)
    assert found.step_seconds > 0


def test_a_preset_is_compared_with_the_fastest_peer_that_reaches_the_loss() -> None:
    def row(
        name: str, seconds: float, loss: float, *, mbit: float = 20, reaches: bool = True
    ) -> reach.Reached:
        return reach.Reached(name=name, mbit=mbit, steps=100, seconds=seconds, loss=loss, reaches=reaches)

    text = reach.table(
        [
            row("DDP fp32", 100, 1.3),
            row("DDP fp16", 60, 1.301),
            row("DDP powersgd", 10, 1.5, reaches=False),
            row("DDP gradwire:8bit", 20, 1.3),
            row("DDP fp32", 5, 1.3, mbit=100),
            row("low-communication", 6, 1.4, reaches=False),
            row("low-communication", 12, 1.29),
        ]
    ).splitlines()
    assert text[4].endswith("| not reached |")
    assert text[5].endswith("| 3.0 × |")
    assert text[6].endswith("| 1.0 × |")
    assert text[7] == "| low-communication | 20 | 100 | 1.4000 | 60 | 6 | not reached |"
    assert text[8] == "| low-communication | 20 | 100 | 1.2900 | 120 | 12 | 5.0 × |"
