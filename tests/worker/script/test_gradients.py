"""Gradients that leave while backward goes on: which the script has changed by its step, and which it throws
away."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
import torch
from stepping_server import BATCH, EPOCHS, INPUTS, RATE, STEPS, Network, SteppingServer, flat, joined
from torch import nn

from gradwire.proto import messages as m
from gradwire.worker.training.hooks import COLUMNS, checksum, sums

FROM_NOW_ON = "from now on gradients leave after the backward pass, not during it"


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the warnings about gradients. Scripts are also warned where kernels are compiled first, and
    where they leave before their job ends, as those here do."""
    others = "kernels", "the script ends before the job"
    warnings = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    return [each for each in warnings if not any(other in each for other in others)]


def accumulated(
    monkeypatch: pytest.MonkeyPatch, *, every: int, no_sync: bool = False
) -> tuple[SteppingServer, list[float]]:
    """Train with a step after some of the batches only."""
    server = SteppingServer()
    with joined(monkeypatch, server) as job:
        model = Network()
        model, optimizer = job.attach(model, torch.optim.SGD(model.parameters(), lr=RATE))
        for _ in job.epochs():
            for number, inputs in enumerate(job.batches(INPUTS), start=1):
                last = number % every == 0
                with job.no_sync() if no_sync and not last else contextlib.nullcontext():
                    (model(inputs).square().mean() / every).backward()
                if last:
                    optimizer.step()
                    optimizer.zero_grad()
        return server, flat(model).tolist()


def test_a_script_that_accumulates_may_send_gradients_during_the_backward_pass_of_the_last_batch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where it says nothing, those of the first batch have left for nothing, once for each assignment of this
    server, which does not learn."""
    told, expected = accumulated(monkeypatch, every=STEPS, no_sync=True)
    untold, found = accumulated(monkeypatch, every=STEPS)
    assert found == expected
    assert not warnings_of(caplog)
    parts = len(list(Network().parameters()))
    assert (len(told.parts), told.abandoned) == (parts * EPOCHS, [])
    assert (len(untold.parts), untold.abandoned) == (parts * EPOCHS * 2, [1, 3])
    for server in (told, untold):
        assert [commit.samples for commit, _ in server.pushed] == [BATCH * STEPS] * EPOCHS
        assert [each.batches for each in server.asked] == [*range(1, STEPS)] * EPOCHS


def test_a_batch_that_is_passed_over_before_its_backward_pass_is_no_step(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = SteppingServer()
    with joined(monkeypatch, server) as job:
        model = Network()
        model, optimizer = job.attach(model, torch.optim.SGD(model.parameters(), lr=RATE))
        for number, inputs in enumerate(job.batches(INPUTS)):
            loss = model(inputs).square().mean()
            if number == 1:
                continue
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert server.abandoned == [2]
    assert not warnings_of(caplog)
    assert [commit.samples for commit, _ in server.pushed] == [BATCH] + [2 * BATCH] + [BATCH] * (STEPS - 3)


def negated(gradient: torch.Tensor) -> None:
    gradient.neg_()


def exchanged(gradient: torch.Tensor) -> None:
    gradient.copy_(gradient.flip(0))


@pytest.mark.parametrize("change", [negated, exchanged])
def test_a_gradient_that_the_script_negates_or_permutes_is_pushed_as_it_is_then(
    change: Callable[[torch.Tensor], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its bits are the same in another order, or have the same sum."""
    server = SteppingServer()
    with joined(monkeypatch, server) as job:
        model = nn.Linear(6, 2, bias=False)
        model, optimizer = job.attach(model, torch.optim.SGD(model.parameters(), lr=RATE))
        assert isinstance(model.weight, nn.Parameter)
        for inputs in job.batches(INPUTS):
            outputs = model(inputs)
            (outputs[:, 0] - outputs[:, 1]).mean().backward()
            gradient = model.weight.grad
            assert gradient is not None
            before = model.weight.detach().clone()
            change(gradient)
            kept = gradient.clone()
            optimizer.step()
            optimizer.zero_grad()
            assert torch.equal(model.weight, before - RATE * kept)
    (said,) = warnings_of(caplog)
    assert said.startswith(f"{FROM_NOW_ON}: the script changes gradients between backward() and step()")


def of_sums(gradient: torch.Tensor) -> bytes:
    """Return the sums that a GPU computes of a gradient, before it comes to the host."""
    return sums(gradient).numpy().tobytes()


@pytest.mark.parametrize("reduced", [checksum, of_sums])
@pytest.mark.parametrize("size", [2, 5, COLUMNS, 3 * COLUMNS + 7])
def test_checksums_know_the_order_and_the_signs_of_values(
    reduced: Callable[[torch.Tensor], object], size: int
) -> None:
    values = torch.randn(size, generator=torch.Generator().manual_seed(size))
    places = sorted({0, 1, size // 2, size - 2, size - 1})
    changed = [values.flip(0), -values, values.roll(1)]
    for one, other in combinations(places, 2):
        changed.append(values.clone())
        changed[-1][[one, other]] = changed[-1][[other, one]]
        changed.append(values.clone())
        changed[-1][one] *= -1
        changed[-1][other] *= -1
    assert reduced(values.clone()) == reduced(values)
    assert all(reduced(each) != reduced(values) for each in changed)


@pytest.mark.timeout(20)
def test_a_script_that_was_interrupted_while_it_asked_for_batches_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Interrupting(SteppingServer):
        interrupts = True

        def ask(self, request: m.More) -> None:
            if not self.interrupts:
                super().ask(request)

        def next(self, timeout_s: float) -> Any:
            if self.interrupts and not self.messages and self.plan is not None:
                self.interrupts = False
                raise KeyboardInterrupt
            return super().next(timeout_s)

    server = Interrupting()
    with joined(monkeypatch, server) as job:
        model = Network()
        model, optimizer = job.attach(model, torch.optim.SGD(model.parameters(), lr=RATE))

        def cell() -> None:
            for _ in job.epochs():
                for number, inputs in enumerate(job.batches(INPUTS), start=1):
                    (model(inputs).square().mean() / STEPS).backward()
                    if number % STEPS == 0:
                        optimizer.step()
                        optimizer.zero_grad()

        with pytest.raises(KeyboardInterrupt):
            cell()
        cell()
        found = flat(model).tolist()
    _, expected = accumulated(monkeypatch, every=STEPS)
    assert found == expected
