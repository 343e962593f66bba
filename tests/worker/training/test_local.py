"""Rounds of local steps, with a script's optimizer and with the job's: their pushes, and steps left out."""

from __future__ import annotations

import math
from typing import Any, cast

import numpy as np
import pytest
import torch
from scripted import Script
from torch import nn

from gradwire.compressors import LayerRule, ModelCompressor, decode
from gradwire.optim.optimizer import Optimizer, parse_optimizer
from gradwire.proto import messages as m
from gradwire.worker.metrics import WorkerMetrics
from gradwire.worker.script.optimizer import JobOptimizer
from gradwire.worker.session.compression import Compression
from gradwire.worker.session.replica import Replica
from gradwire.worker.session.session import Session
from gradwire.worker.tasks.driver import WorkersOptimizer
from gradwire.worker.training.local import LocalOptimizer, LocalStep, LocalStrategy
from gradwire.worker.training.work import Local


class TooManyError(Exception):
    """Too many steps in a row have contributed nothing."""


def unasked(scale: float, overflow: bool, evaluate: object) -> None:
    raise AssertionError("a test steps the round, not the optimizer of the loop")


class Driven:
    """A model whose gradients a test gives by hand; its second tensor has none."""

    def __init__(
        self, make: Any = torch.optim.SGD, rate: float = 0.5, *, of_job: str = "", **how: Any
    ) -> None:
        """of_job: spec of the job's optimizer, to step with that."""
        self.model = nn.Module()
        self.model.register_parameter("moving", nn.Parameter(torch.ones(3)))
        self.model.register_parameter("still", nn.Parameter(torch.ones(2)))
        self.replica = Replica(self.model, 64)
        self.replica.version = 0
        plan = self.replica.manifest.plan()
        self.replica.adopt(plan)
        compressor = ModelCompressor(self.replica.manifest.specs, "none", LayerRule(), 1, 0)
        self.script = Script()
        self.script.plan = plan
        session = Session(
            cast("Any", self.script),
            self.replica,
            Compression(compressor),
            WorkerMetrics("none"),
            initialize=False,
        )
        session.compression.compressor.adopt(plan)
        optimizer: LocalOptimizer = JobOptimizer(make(self.model.parameters(), lr=rate), unasked, here=True)
        if of_job:
            parameters = self.replica.parameters
            optimizer = WorkersOptimizer(Optimizer(parse_optimizer(of_job), parameters, rate), parameters)
        options: dict[str, Any] = {"batch_size": 4, "give_up": TooManyError, **how}
        self.strategy = LocalStrategy(session, WorkerMetrics("none"), optimizer, **options)
        self.round: LocalStep

    @property
    def moving(self) -> torch.Tensor:
        return cast(torch.Tensor, self.model.moving)

    def begin(self, samples: int = 12, number: int = 1) -> None:
        ranges = (m.Range(start=0, count=samples),)
        assignment = m.Assignment(id=number, version=0, ranges=ranges, world=1)
        self.round = self.strategy.begin(assignment, samples)

    def step(self, *gradient: float, scale: float = 1.0, loss: float = 1.0) -> bool:
        self.moving.grad = torch.tensor(gradient)
        return self.round.push(loss, scale)

    def pushed(self, index: int = 0) -> tuple[int, float | None, list[float]]:
        """Samples, loss and change of a push."""
        commit, payloads = self.script.pushed[index]
        return commit.samples, commit.loss, [float(x) for each in payloads for x in np.asarray(decode(each))]


def test_a_round_is_pushed_with_its_last_step_and_leaves_the_parameters() -> None:
    run = Driven()
    run.begin(10)
    sizes: list[int] = []
    for gradient, loss in ((2.0, 3.0), (4.0, 2.0), (6.0, 1.0)):
        sizes.append(run.round.batch.stop - run.round.batch.start)
        assert run.script.pushed == []
        assert run.step(gradient, 0.0, 0.0, loss=loss)
    assert sorted(sizes) == [3, 3, 4]
    assert not run.round.open
    assert run.pushed() == (10, 3.0, [6.0, 0.0, 0.0, 0.0, 0.0])
    assert run.moving.tolist() == [1.0] * 3


def test_steps_after_the_first_pull_back_and_scaled_gradients_are_unscaled() -> None:
    run = Driven(work=Local(correction=0.5))
    run.begin(8)
    run.step(16.0, 0.0, 0.0, scale=8.0)
    assert run.moving.tolist() == [0.0, 1.0, 1.0]
    run.step(0.0, 0.0, 0.0)
    assert run.pushed()[2][:3] == [0.5, 0.0, 0.0]


@pytest.mark.parametrize("correction", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("of_job", ["", "sgd"])
def test_it_is_descent_with_a_pull_to_where_it_began(of_job: str, steps: int, correction: float) -> None:
    run, plain = Driven(rate=0.1, of_job=of_job, work=Local(correction=correction)), torch.ones(3)
    run.begin(4 * steps)
    for step in range(steps):
        gradient = plain * (1.0 + step)
        run.step(*[float(value) * (1.0 + step) for value in run.moving.detach()])
        plain = plain - 0.1 * gradient - correction * (plain - 1.0)
    np.testing.assert_allclose(run.pushed()[2][:3], (1.0 - plain).numpy(), rtol=1e-5, atol=1e-7)


def test_a_round_that_asks_again_after_an_interrupt_keeps_its_steps() -> None:
    driven = Driven()
    ranges = (m.Range(start=0, count=4),)
    driven.round = driven.strategy.begin(m.Assignment(id=1, version=0, ranges=ranges, world=1, steps=2), 4)
    assert driven.step(1.0, 2.0, 3.0)
    driven.round.request()
    driven.round.request()
    assert driven.moving.tolist() == [1, 1, 1]
    more = (m.Range(start=0, count=8),)
    driven.round.extend(
        m.Assignment(id=1, version=0, ranges=more, batches=(4, 4), world=1, steps=2, accumulate=1)
    )
    assert driven.moving.tolist() == [0.5, 0, -0.5]


def test_what_the_optimizer_remembers_stays_from_round_to_round() -> None:
    run = Driven(of_job="sgd:momentum=0.9")
    for number in (1, 2):
        run.begin(4, number)
        run.step(1.0, 2.0, 3.0)
    np.testing.assert_allclose(run.pushed(1)[2][:3], 1.9 * np.array(run.pushed(0)[2][:3]), rtol=1e-6)


@pytest.mark.parametrize("of_job", ["", "adagrad"])
@pytest.mark.parametrize("how", ["gradient", "loss", "skipped"])
def test_a_step_that_cannot_be_used_is_left_out_of_its_round(how: str, of_job: str) -> None:
    """And out of what the optimizer remembers."""
    run = Driven(torch.optim.Adagrad, of_job=of_job)
    run.begin(12)
    assert run.step(1.0, 1.0, 1.0)
    if how == "skipped":
        run.round.skip("the script went on")
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
    with pytest.raises(TooManyError, match="is not finite in 10 steps in a row"):
        run.step(math.nan, 1.0, 1.0)
    assert [commit.samples for commit, _ in run.script.pushed] == [0] * 10


def test_an_optimizer_may_compute_gradients_as_often_as_it_wants() -> None:
    run = Driven(torch.optim.LBFGS, batch_size=None, rates=(1.0,))
    run.begin(7)
    times: list[float] = []

    def evaluate() -> float:
        run.moving.grad = 2 * run.moving.detach()
        times.append(float(run.moving.detach().square().sum()))
        return times[-1]

    assert run.round.push(0.0, 1.0, evaluate)
    assert len(times) > 1
    assert run.pushed()[2][:3] == pytest.approx([1.0] * 3, abs=1e-3)
    (header, _), *_ = run.script.parts.values()
    assert header.learning_rates == (1.0,)
