"""`gc-bench curve`: jobs of equal length and batch, and losses relative to the best rate of a baseline."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
import torch

from gradwire.benchmarks import curve
from gradwire.deploy.daemons import check_together
from gradwire.worker.tasks import load

GIVEN = {"task": "characters:characters=50000", "workers": 4, "batch_size": 16, "steps": 1000}


def settings(options: Any) -> Any:
    return curve.settings_of(options, argparse.Namespace(**GIVEN), seed=3)


@pytest.mark.parametrize("name", curve.COMPOSITIONS)
def test_every_composition_is_a_job_of_as_many_steps_and_samples(name: str) -> None:
    found = settings(curve.COMPOSITIONS[name])
    check_together(found)
    each = int(found.mode.partition("steps=")[2].partition(",")[0]) if found.mode[:5] == "local" else 1
    assert (found.workers, found.batch_size, found.max_steps) == (4, 16, 1000 // each)


def test_a_baseline_is_one_worker_with_the_batch_of_all() -> None:
    for options in curve.baselines().values():
        found = settings(options)
        assert (found.workers, found.batch_size, found.max_steps) == (1, 64, 100)


def test_adamw_of_the_baseline_decays_no_biases_and_norms() -> None:
    task = load(settings(curve.baselines()["AdamW alone, 0.003"]).task)
    network = task.model()
    assert task.groups is not None
    (group,) = task.groups(network)
    assert group["weight_decay"] == 0
    assert {id(each) for each in group["params"]} == {id(p) for p in network.parameters() if p.dim() < 2}
    assert isinstance(network, torch.nn.Module)


def test_losses_are_compared_with_the_best_rate_over_all_seeds() -> None:
    def run(name: str, seed: int, loss: float, up: int = 1, down: int = 1) -> curve.CurveRun:
        shared: dict[str, Any] = {"task": "t", "workers": 4, "steps": 10, "float32": 1000, "seconds": 1.0}
        return curve.CurveRun(name=name, seed=seed, loss=loss, up=up, down=down, **shared)

    text = curve.table(
        [
            *(run("AdamW alone, 0.003", seed, loss) for seed, loss in ((1, 1.0), (2, 2.0))),
            *(run("AdamW alone, 0.006", seed, loss) for seed, loss in ((1, 1.2), (2, 1.2))),
            run("24 steps", 1, 1.14, up=5, down=4),
        ]
    )
    assert text.splitlines()[-1] == "| 24 steps | 1 | 1.140 | 200 | 250 | -5.0 % | – |"
    assert text.splitlines()[2].startswith("| AdamW alone, 0.003 | 2 | 1.500 ±")
    assert text.splitlines()[2].endswith("| – | – | +25.0 % | – |")
