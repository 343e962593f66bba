"""Local steps of one round have the learning rates that the server's schedule has for each of them."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest
from layered import Layers, Overlap, Run, initial, sent_in, squares, stepped

from gradwire.proto import messages as m

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
    run = run_of(overlap)
    for version, rates in enumerate(RATES):
        start = initial(run) * np.float32(1 + version / 8)
        change = start - stepped(start, version, rates=rates)
        np.testing.assert_allclose(sent_in(run, version), change, rtol=1e-3, atol=1e-6)


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
