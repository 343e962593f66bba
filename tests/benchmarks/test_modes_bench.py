"""gc-bench modes: a run with a slow worker, and the table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from gradwire.benchmarks import paced
from gradwire.benchmarks.jobs import DIGITS_SAMPLES
from gradwire.benchmarks.modes import ModesRow, measure, table
from gradwire.worker.tasks import load

ROW = ModesRow(
    mode="sync",
    situation="even",
    seconds=10.0,
    samples_per_second=1000.0,
    accuracy=0.9,
    refused_pushes=0,
    largest_staleness=0,
    repeated_samples=0,
    kills=0,
    curve=((1.0, 0.5), (10.0, 0.9)),
)


def test_paces_are_relative_to_even_workers_and_to_sync() -> None:
    rows = [
        ROW,
        replace(ROW, situation="one slow", samples_per_second=100.0),
        replace(ROW, mode="async", samples_per_second=1100.0),
        replace(ROW, mode="async", situation="one slow", samples_per_second=770.0),
    ]
    lines = table(rows).splitlines()[2:]
    assert [line.split(" | ")[3:5] for line in lines] == [
        ["1.00", "1.00"],
        ["0.10", "1.00"],
        ["1.00", "1.10"],
        ["0.70", "7.70"],
    ]


def test_a_slow_worker_is_measured_with_real_processes(tmp_path: Path) -> None:
    row = measure("stale:bound=4", "one slow", 1, 1, tmp_path)
    assert 0.1 < row.accuracy < 1
    assert row.largest_staleness <= 4
    assert row.samples_per_second == pytest.approx(DIGITS_SAMPLES / row.seconds)
    assert len(row.curve) == 1


def test_pace_is_time_per_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    task, plain = paced.digits(seconds=0.5), load("digits")
    model = task.model()
    batch = task.batch(np.arange(4))
    assert torch.equal(task.loss(model, batch), plain.loss(model, batch))
    monkeypatch.setattr(paced, "slower", 10.0)
    task.loss(model, batch)
    assert slept == [2.0, 20.0]
