"""Elastic averaging (`local:elastic=α`) against a loop in numpy: the worker's own parameters between
rounds."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from layered import INPUTS, WIDTH, Layers, Run, gradients, rounds, squares
from torch import nn

from gradwire.worker.training.sharding import epoch_order

ALPHA, RATE, MOMENTUM = 0.3, 0.1, 0.5


def elastic(overlap: Any = "backward", compressor: str = "none", loss: Any = squares) -> Run:
    work = f"local:correction=0.0,delayed=off,elastic={ALPHA}"
    terms: dict[str, Any] = {
        "work": work,
        "seed": 7,
        "batch_size": 2,
        "optimizer": f"sgd:momentum={MOMENTUM}",
    }
    return Run(overlap, Layers, loss, compressor, **terms)


def test_worker_and_center_approach_each_other_as_in_the_formula() -> None:
    run, order = rounds(elastic(), 0, 4), epoch_order(7, 0, len(INPUTS))
    first = [run.first[place].view(np.float32).reshape(WIDTH, WIDTH) for place in (0, 1, 3)]
    own: list[np.ndarray[Any, Any]] = [each.copy() for each in first]
    momentum: list[np.ndarray[Any, Any]] = [np.zeros_like(each) for each in first]
    for version in range(4):
        center = [each * np.float32(1 + version / 8) for each in first]  # others move it too
        for at in (4 * version, 4 * version + 2):
            for place, gradient in enumerate(gradients(own, order[at : at + 2])):
                momentum[place] = MOMENTUM * momentum[place] + gradient
                own[place] = own[place] - np.float32(RATE) * momentum[place]
        pushed = [ALPHA * (middle - mine) for middle, mine in zip(center, own, strict=True)]
        own = [mine - ALPHA * (mine - middle) for middle, mine in zip(center, own, strict=True)]
        sent = np.concatenate([np.frombuffer(each, np.float32) for each in run.bytes_of(version)])
        unused = np.zeros(WIDTH * WIDTH, np.float32)
        flat = [each.reshape(-1) for each in pushed]
        expected = np.concatenate([*flat[:2], unused, flat[2]])
        np.testing.assert_allclose(sent, expected, rtol=1e-3, atol=1e-6)


def test_overlap_changes_no_bit_of_elastic_rounds() -> None:
    for compressor in ("none", "topk:ratio=8"):
        assert (
            rounds(elastic("off", compressor), 0, 4).pushed
            == rounds(elastic("backward", compressor), 0, 4).pushed
        )


def test_a_worker_continues_from_its_own_elastic_parameters() -> None:
    """Saved and restored in the middle, it pushes the same bits."""
    whole, half = rounds(elastic(), 0, 4), rounds(elastic(), 0, 2)
    image = copy.deepcopy(half.trainer._driver.strategy.image())  # pyright: ignore[reportPrivateUsage]
    later = elastic()
    later.trainer._driver.strategy.restore(image)  # pyright: ignore[reportPrivateUsage]
    assert rounds(later, 2, 4).pushed == whole.pushed[2:]
    newcomer = rounds(elastic(), 2, 4)
    assert newcomer.pushed != whole.pushed[2:]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_elastic_round_without_a_finite_step_moves_nothing(bad: float) -> None:
    taken: list[int] = []

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        taken.append(1)
        return squares(model, batch) * (bad if len(taken) in (3, 4) else 1.0)

    run = rounds(elastic(loss=loss), 0, 3)
    assert [commit.samples for commit, _ in run.script.pushed] == [4, 0, 4]
    strategy: Any = run.trainer._driver.strategy  # pyright: ignore[reportPrivateUsage]
    assert all(bool(each.isfinite().all()) for each in strategy.variants[0].own)
