"""Local steps, against the plain loop that they are."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import nn

from gradwire.optimizer import Optimizer, parse_optimizer
from gradwire.worker.tasks.local import LocalTraining
from gradwire.worker.tasks.sharding import Indices

INPUTS = torch.randn(40, 5, generator=torch.Generator().manual_seed(1))
TARGETS = torch.randn(40, 3, generator=torch.Generator().manual_seed(2))
BATCHES = [np.arange(start, start + 8) for start in (0, 8, 16, 24)]


def network() -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(5, 3)


def loss_of(model: nn.Module, batch: Indices) -> torch.Tensor:
    return nn.functional.mse_loss(model(INPUTS[batch]), TARGETS[batch])


def training(parameters: Sequence[torch.Tensor], optimizer: str, correction: float) -> LocalTraining:
    return LocalTraining(parameters, Optimizer(parse_optimizer(optimizer), parameters, 1.0), correction)


def train(
    model: nn.Linear, local: LocalTraining, batches: list[Indices], rate: float = 0.1
) -> tuple[float, list[torch.Tensor]]:
    """For a model of which the loss reaches everything."""

    def gradients(step: int, batch: Indices) -> float:
        for parameter in model.parameters():
            parameter.grad = None
        loss = loss_of(model, batch)
        torch.autograd.backward(loss)
        return float(loss.detach())

    loss, changes = local.change(batches, rate, gradients)
    assert all(change is not None for change in changes)
    return loss, [change for change in changes if change is not None]


@pytest.mark.parametrize("correction", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_it_is_descent_with_a_pull_to_where_it_began(steps: int, correction: float) -> None:
    model, plain = network(), network()
    start = [parameter.detach().clone() for parameter in plain.parameters()]
    losses: list[float] = []
    for batch in BATCHES[:steps]:
        plain.zero_grad()
        loss = loss_of(plain, batch)
        losses.append(float(loss.detach()))
        torch.autograd.backward(loss)
        with torch.no_grad():
            for parameter, before in zip(plain.parameters(), start, strict=True):
                assert parameter.grad is not None
                parameter.sub_(0.1 * parameter.grad + correction * (parameter - before))
    local = training(list(model.parameters()), "sgd", correction)
    loss_found, changes = train(model, local, BATCHES[:steps])
    assert loss_found == pytest.approx(losses[0])
    for change, parameter, before in zip(changes, plain.parameters(), start, strict=True):
        torch.testing.assert_close(change, before - parameter.detach(), rtol=1e-5, atol=1e-7)
    for parameter, before in zip(model.parameters(), start, strict=True):
        assert torch.equal(parameter, before), "the replica is as it was"


def test_a_parameter_that_no_step_reaches_has_no_change() -> None:
    """One that some steps reach has: the optimizer counts its own steps."""
    parameters = [torch.ones(2), torch.ones(3), torch.ones(4)]
    local = training(parameters, "sgd", 0.5)

    def gradients(step: int, batch: Indices) -> float:
        parameters[0].grad = torch.ones(2)
        parameters[1].grad = torch.ones(3) if step == 0 else None
        return 1.0

    _, (first, second, third) = local.change(BATCHES[:2], 0.1, gradients)
    assert third is None
    assert first is not None
    assert second is not None
    torch.testing.assert_close(first, torch.full((2,), 0.1 + 0.1 - 0.5 * 0.1))
    torch.testing.assert_close(second, torch.full((3,), 0.1 - 0.5 * 0.1))


def test_the_optimizers_state_stays_from_round_to_round_until_it_is_reset() -> None:
    model = network()
    local = training(list(model.parameters()), "sgd:momentum=0.9", 0.0)
    (_, first), (_, second) = train(model, local, BATCHES[:1]), train(model, local, BATCHES[:1])
    torch.testing.assert_close(second[0], 1.9 * first[0])
    local.reset()
    _, again = train(model, local, BATCHES[:1])
    assert torch.equal(again[0], first[0])


def test_the_loss_is_that_of_the_model_that_the_round_began_with() -> None:
    model = network()
    local = training(list(model.parameters()), "sgd", 0.0)
    at_the_start = float(loss_of(model, BATCHES[0]).detach())
    loss, _ = train(model, local, BATCHES)
    assert loss == pytest.approx(at_the_start)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_told_whichever_step_it_comes_in(bad: float) -> None:
    model = network()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    local = training(list(model.parameters()), "sgd", 0.0)
    loss, _ = local.change(BATCHES, 0.1, lambda step, batch: bad if step == 2 else 1.0)
    assert not math.isfinite(loss)
