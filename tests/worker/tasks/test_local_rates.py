"""Local steps of one round have the learning rates that the server's schedule has for each of them."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest
from layered import INPUTS, WIDTH, Layers, Overlap, Run, gradients, squares

from gradwire.proto import messages as m
from gradwire.worker.training.sharding import epoch_order

RATES = ((0.3, 0.2), (0.1, 0.05), (0.0, 0.4))


def run_of(overlap: Overlap = "backward", **given: Any) -> Run:
    work = "local:correction=0.0,delayed=off"
    run = Run(overlap, Layers, squares, "none", work=work, seed=7, batch_size=2, optimizer="sgd")
    for version, rates in enumerate(RATES):
        fields = {"learning_rate": 9.0, "local_rates": rates, **given}
        assignment = run.given(version, version + 1 < len(RATES), **fields)
        run.script.messages += [*run.update(version), assignment]
    return run.steps(0)


@pytest.mark.parametrize("overlap", get_args(Overlap))
def test_each_step_has_the_rate_of_its_place(overlap: Overlap) -> None:
    run, order = run_of(overlap), epoch_order(7, 0, len(INPUTS))
    first = [run.first[place].view(np.float32).reshape(WIDTH, WIDTH) for place in (0, 1, 3)]
    for version, rates in enumerate(RATES):
        start = [each * np.float32(1 + version / 8) for each in first]
        x = [each.copy() for each in start]
        for at, rate in zip((4 * version, 4 * version + 2), rates, strict=True):
            found = gradients(x, order[at : at + 2])
            x = [each - np.float32(rate) * g for each, g in zip(x, found, strict=True)]
        sent = np.concatenate([np.frombuffer(each, np.float32) for each in run.bytes_of(version)])
        for began, ended, place in zip(start, x, (0, 1, 3), strict=True):
            pushed = sent.reshape(4, WIDTH, WIDTH)[place]
            np.testing.assert_allclose(pushed, began - ended, rtol=1e-3, atol=1e-6)


def test_one_rate_for_all_and_rates_that_are_all_equal_are_the_same() -> None:
    assert run_of(learning_rate=0.1, local_rates=()).pushed == run_of(local_rates=(0.1, 0.1)).pushed
    assert run_of(local_rates=(0.1,)).pushed == run_of(local_rates=(0.1, 0.1)).pushed


def test_a_round_knows_how_much_of_it_is_done() -> None:
    run = run_of()
    strategy = run.trainer._driver.strategy  # pyright: ignore[reportPrivateUsage]
    assignment = m.Assignment(id=50, version=3, ranges=(m.Range(start=0, count=8),), local_rates=(3.0, 2.0))
    step, found = strategy.begin(assignment, 8), list[tuple[int, float, float]]()
    while step.open:
        found.append((step.taken, step.done, step.learning_rate))
        step.skip("a test")
    assert found == [(0, 0.0, 3.0), (1, 0.25, 2.0), (2, 0.5, 2.0), (3, 0.75, 2.0)]
