"""`gc-bench curve`: jobs of equal length and batch, and losses relative to the best rate of a baseline."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from gradwire.benchmarks import curve
from gradwire.benchmarks.arguments import BenchError
from gradwire.deploy.daemons import check_together
from gradwire.worker.tasks import load

GIVEN: dict[str, Any] = {"task": "characters:characters=50000", "workers": 4, "batch_size": 16, "steps": 1000}


def settings(options: Any) -> Any:
    return curve.settings_of(options, **GIVEN, seed=3)


@pytest.mark.parametrize("name", curve.COMPOSITIONS)
def test_every_composition_is_a_job_of_as_many_steps_and_samples(name: str) -> None:
    found = settings(curve.COMPOSITIONS[name])
    check_together(found)
    each = int(found.mode.partition("steps=")[2].partition(",")[0]) if found.mode[:5] == "local" else 1
    of_epoch = math.ceil(load(GIVEN["task"]).train_samples / 64)
    lengths = [min(each, of_epoch - first) for first in range(0, of_epoch, each)]
    taken = sum(itertools.islice(itertools.cycle(lengths), found.max_steps))
    assert (found.workers, found.batch_size) == (4, 16)
    assert abs(taken - 1000) <= max(lengths) / 2


@pytest.mark.parametrize(
    ("steps", "each", "samples", "expected"),
    [
        (1000, 8, 14_843, 125),  # 232 steps in an epoch: 29 rounds
        (1000, 25, 14_843, 43),  # nine rounds of 25 and one of 7, four times, and three of 25
        (1, 8, 14_843, 1),
        (12, 8, 64 * 100, 2),
        (11, 8, 64 * 100, 1),
        (7, 8, 64 * 3, 2),  # rounds of 3
    ],
)
def test_rounds_come_as_near_as_possible(steps: int, each: int, samples: int, expected: int) -> None:
    assert curve.rounds(steps, each, samples, 64) == expected


def test_a_baseline_is_one_worker_with_the_batch_of_all() -> None:
    for options in curve.baselines().values():
        found = settings(options)
        assert (found.workers, found.batch_size) == (1, 64)


def test_a_run_with_other_options_is_another_run(tmp_path: Path) -> None:
    """Also after JSON."""
    options = curve.COMPOSITIONS["8 steps, float32"]
    one = curve.plain(settings(options))
    assert json.loads(json.dumps(one)) == curve.plain(settings(options))
    assert one != curve.plain(settings({**options, "learning_rate": 0.1}))
    path = tmp_path / "runs.json"
    path.write_text('[{"name": "of another release"}]')
    with pytest.raises(BenchError, match="no file of this release's runs"):
        curve.read(path)


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
        shared: dict[str, Any] = {"task": "t", "workers": 4, "steps": 10, "taken": 9, "float32": 1000}
        run: dict[str, Any] = {
            "name": name,
            "options": {"seed": seed},
            "loss": loss,
            "up": up,
            "down": down,
            "seconds": 1.0,
        }
        return curve.CurveRun(**run, **shared)

    text = curve.table(
        [
            *(run("AdamW alone, 0.003", seed, loss) for seed, loss in ((1, 1.0), (2, 2.0))),
            *(run("AdamW alone, 0.006", seed, loss) for seed, loss in ((1, 1.2), (2, 1.2))),
            run("24 steps", 1, 1.14, up=5, down=4),
        ]
    )
    assert text.splitlines()[-1] == "| 24 steps | 1 | 9 | 1.140 | 200 | 250 | -5.0 % | – |"
    assert text.splitlines()[2].startswith("| AdamW alone, 0.003 | 2 | 9 | 1.500 ±")
    assert text.splitlines()[2].endswith("| – | – | +25.0 % | – |")
