"""Steps that a script's optimizer takes on its worker, and what comes of those that cannot be used."""

from __future__ import annotations

import math
from typing import Any, cast

import numpy as np
import pytest
import torch
from scripted import Script
from torch import nn

from gradwire.compressors import LayerRule, ModelCompressor, decode
from gradwire.proto import messages as m
from gradwire.worker.metrics import Metrics
from gradwire.worker.script.local import LocalTurns
from gradwire.worker.script.optimizer import JobOptimizer
from gradwire.worker.script.turn import ScriptError
from gradwire.worker.session.compression import Compression
from gradwire.worker.session.replica import Replica
from gradwire.worker.session.session import Session


def unasked(scale: float, overflow: bool, evaluate: object) -> None:
    raise AssertionError("a test steps the turns, not the optimizer of the loop")


class Driven:
    """A model whose gradients a test gives by hand; its second tensor has none."""

    def __init__(self, make: Any = torch.optim.SGD, rate: float = 0.5, **how: Any) -> None:
        self.model = nn.Module()
        self.model.register_parameter("moving", nn.Parameter(torch.ones(3)))
        self.model.register_parameter("still", nn.Parameter(torch.ones(2)))
        replica = Replica(self.model, 64)
        replica.version = 0
        plan = replica.manifest.plan()
        replica.adopt(plan)
        compressor = ModelCompressor(replica.manifest.specs, "none", LayerRule(), 1, 0)
        self.script = Script()
        self.script.plan = plan
        session = Session(
            cast("Any", self.script), replica, Compression(compressor), Metrics("none"), initialize=False
        )
        session._compression.adopt(plan)  # pyright: ignore[reportPrivateUsage]
        self.optimizer = JobOptimizer(make(self.model.parameters(), lr=rate), unasked, here=True)
        options: dict[str, Any] = {"batch_size": 4, **how}
        self.turns = LocalTurns(session, self.optimizer, **options)

    @property
    def moving(self) -> torch.Tensor:
        return cast(torch.Tensor, self.model.moving)

    def begin(self, samples: int = 12, number: int = 1) -> None:
        ranges = (m.Range(start=0, count=samples),)
        self.turns.begin(m.Assignment(id=number, version=0, ranges=ranges, world=1), samples)

    def step(self, *gradient: float, scale: float = 1.0, loss: float = 1.0) -> bool:
        self.moving.grad = torch.tensor(gradient)
        self.turns.loss = loss
        return self.turns.push(scale)

    def pushed(self, place: int = 0) -> tuple[int, float, list[float]]:
        """Samples, loss and change of a push."""
        commit, payloads = self.script.pushed[place]
        return commit.samples, commit.loss, [float(x) for each in payloads for x in np.asarray(decode(each))]


def test_a_round_is_pushed_with_its_last_step_and_leaves_the_parameters() -> None:
    run = Driven()
    run.begin(10)
    sizes: list[int] = []
    for gradient, loss in ((2.0, 3.0), (4.0, 2.0), (6.0, 1.0)):
        sizes.append(run.turns.batch.stop - run.turns.batch.start)
        assert run.script.pushed == []
        assert run.step(gradient, 0.0, 0.0, loss=loss)
    assert sorted(sizes) == [3, 3, 4]
    assert not run.turns.open
    samples, loss, change = run.pushed()
    assert (samples, loss, change[:3]) == (10, 3.0, [6.0, 0.0, 0.0])
    assert run.moving.tolist() == [1.0] * 3
    with pytest.raises(ScriptError, match="there is no work to answer"):
        run.step(1.0, 1.0, 1.0)


def test_steps_after_the_first_pull_back_and_scaled_gradients_are_unscaled() -> None:
    run = Driven(correction=0.5)
    run.begin(8)
    run.step(16.0, 0.0, 0.0, scale=8.0)
    assert run.moving.tolist() == [0.0, 1.0, 1.0]
    run.step(0.0, 0.0, 0.0)
    assert run.pushed()[2][:3] == [0.5, 0.0, 0.0]


@pytest.mark.parametrize("how", ["gradient", "loss", "skipped"])
def test_a_step_that_cannot_be_used_is_left_out_of_its_round(how: str) -> None:
    """And out of what the optimizer remembers."""
    run = Driven(torch.optim.Adagrad)
    run.begin(12)
    assert run.step(1.0, 1.0, 1.0)
    if how == "skipped":
        run.turns.skip("the script went on")
    elif how == "loss":
        assert not run.step(5.0, 5.0, 5.0, loss=math.inf)
    else:
        assert not run.step(math.nan, 5.0, 5.0)
    assert run.step(1.0, 1.0, 1.0)
    samples, _, change = run.pushed()
    assert samples == 8
    assert change[:3] == pytest.approx([0.5 + 0.5 / math.sqrt(2)] * 3)


def test_a_round_without_a_step_or_with_a_change_that_is_not_finite_contributes_nothing() -> None:
    run = Driven(rate=1e38)
    for number, gradients in enumerate([(math.nan,) * 3, (1e30, 1.0, 1.0)]):
        run.begin(4, number + 1)
        assert not run.step(*gradients)
        assert run.pushed(number)[0] == 0
        assert run.moving.tolist() == [1.0] * 3
    for number in range(2, 9):
        run.begin(4, number + 1)
        run.step(math.nan, 1.0, 1.0)
    run.begin(4, 10)
    with pytest.raises(ScriptError, match="is not finite, 10 times in a row"):
        run.step(math.nan, 1.0, 1.0)


def test_an_optimizer_may_compute_gradients_as_often_as_it_wants() -> None:
    run = Driven(torch.optim.LBFGS, batch_size=None, rates=(1.0,))
    run.begin(7)
    times: list[float] = []

    def evaluate() -> float:
        run.moving.grad = 2 * run.moving.detach()
        times.append(float(run.moving.detach().square().sum()))
        return times[-1]

    assert run.turns.push(1.0, evaluate)
    assert len(times) > 1
    assert run.pushed()[2][:3] == pytest.approx([1.0] * 3, abs=1e-3)
    (header, _), *_ = run.script.parts.values()
    assert header.learning_rates == (1.0,)
