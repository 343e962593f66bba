"""Elastic averaging (`local:elastic=α`) against a loop in numpy: the worker's own parameters between
rounds."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from layered import ORDER, Layers, Run, gradients, initial, rounds, sent_in, squares
from torch import nn

ALPHA, RATE, MOMENTUM = 0.3, 0.1, 0.5


def elastic(overlap: Any = "backward", compressor: str = "none", loss: Any = squares) -> Run:
    work = f"local:correction=0.0,delayed=off,elastic={ALPHA}"
    optimizer = f"sgd:momentum={MOMENTUM}"
    return Run(overlap, Layers, loss, compressor, work=work, seed=7, batch_size=2, optimizer=optimizer)


def test_worker_and_center_approach_each_other_as_in_the_formula() -> None:
    run = rounds(elastic(), 0, 4)
    first = own = initial(run)
    momentum = np.zeros_like(first)
    for version in range(4):
        center = first * np.float32(1 + version / 8)  # others move it too
        for at in (4 * version, 4 * version + 2):
            momentum = MOMENTUM * momentum + np.stack(gradients(list(own), ORDER[at : at + 2]))
            own = own - np.float32(RATE) * momentum
        pull = ALPHA * (center - own)
        own = own + pull
        np.testing.assert_allclose(sent_in(run, version), pull, rtol=1e-3, atol=1e-6)


def test_overlap_changes_no_bit_of_elastic_rounds() -> None:
    for compressor in ("none", "topk:ratio=8"):
        off, backward = (rounds(elastic(overlap, compressor), 0, 4) for overlap in ("off", "backward"))
        assert off.pushed == backward.pushed


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
