"""Local steps that are taken while the changes of the round before are exchanged (`local:delayed=on`)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from layered import Layers, Normed, Run, initial, sent_in, squares, stepped
from torch import nn

from gradwire.proto import messages as m

RATE = 0.1


def local(
    delayed: str, build: Any = Normed, loss: Any = squares, correction: float = 0.1, **terms: Any
) -> Run:
    work = f"local:correction={correction},delayed={delayed}"
    return Run("off", build, loss, "none", work=work, batch_size=2, seed=7, **terms)


def given(run: Run, version: int, more: bool = True, **changes: Any) -> m.Assignment:
    return run.given(version, more, learning_rate=RATE, **changes)


def rounds(run: Run, count: int, *more: Any) -> Run:
    for version in range(count):
        run.script.messages += [*run.update(version), given(run, version, version + 1 < count)]
    return run.steps(0, *more)


@pytest.mark.parametrize("correction", [0.0, 0.5])
def test_a_round_begins_at_the_last_global_model_less_ones_own_change(correction: float) -> None:
    run = rounds(local("on", Layers, correction=correction), 4)
    assert run.began == [0, 0, 0, 0, 1, 1, 2, 2]
    first = initial(run)
    change = np.zeros_like(first)
    for version in range(4):
        start = first * np.float32(1 + max(0, version - 1) / 8) - change
        change = start - stepped(start, version, correction=correction)
        np.testing.assert_allclose(sent_in(run, version), change, rtol=1e-3, atol=1e-6)


def test_the_replica_holds_the_global_model_while_updates_are_taken_in() -> None:
    run = local("on")
    seen: list[bool] = []

    def look() -> None:
        now = run.replica.values()
        seen.append(all(np.array_equal(*pair) for pair in zip(now, run.first, strict=True)))

    run.script.messages += [*run.update(0), given(run, 0), look, *run.update(1), given(run, 1, more=False)]
    run.steps(0)
    assert seen == [True]
    assert run.began == [0, 0, 0, 0]


@pytest.mark.parametrize("optimizer", ["sgd", "sgd:momentum=0.9", "adam"])
@pytest.mark.parametrize(
    "changes",
    [
        {"ranges": (m.Range(start=40, count=4),)},
        {"ranges": (m.Range(start=4, count=6),)},
        {"epoch": 1},
        {"position": 1},
        {"evaluate_epoch": 1},
    ],
)
def test_a_round_that_was_begun_in_vain_leaves_nothing(changes: dict[str, Any], optimizer: str) -> None:
    runs = local("off", optimizer=optimizer), local("on", optimizer=optimizer)
    for run in runs:
        second, third = given(run, 1, more=False, **changes), given(run, 2, more=False)
        messages = [*run.update(0), given(run, 0), *run.update(1), second, *run.update(2), third]
        run.script.messages += messages
        run.steps(0)
    plain, ahead = runs
    assert ahead.began == [0, 0, *plain.began]
    assert ahead.pushed == plain.pushed
    assert ahead.measured == plain.measured
    assert ahead.script.reports == plain.script.reports
    for mine, other in zip(ahead.replica.model.buffers(), plain.replica.model.buffers(), strict=True):
        assert torch.equal(mine, other)


def test_a_version_that_was_passed_over_is_not_what_was_expected() -> None:
    runs = local("off"), local("on")
    for run in runs:
        later = given(run, 2, more=False, ranges=(m.Range(start=4, count=4),))
        run.script.messages += [*run.update(0), given(run, 0), *run.update(1), *run.update(2), later]
        run.steps(0)
    assert runs[0].pushed == runs[1].pushed


def test_work_told_again_takes_nothing_away() -> None:
    """The case is a reconnect: the bits are the same with it."""
    once, again = rounds(local("on"), 2), local("on")
    first = given(again, 0)
    again.script.messages += [*again.update(0), first, first, *again.update(1), given(again, 1, more=False)]
    again.steps(0)
    assert again.began == once.began == [0, 0, 0, 0]
    assert again.pushed == once.pushed


def test_it_says_how_often_the_next_round_was_begun_in_vain() -> None:
    run = rounds(local("on"), 3)
    ahead = run.trainer._metrics.ahead  # pyright: ignore[reportPrivateUsage]
    found = [ahead.labels(outcome).value for outcome in ("used", "discarded")]
    assert found == [2, 0]


def test_a_local_step_whose_loss_is_not_finite_is_left_out_of_its_round() -> None:
    calls: list[int] = []

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return squares(model, batch) * (math.nan if len(calls) == 4 else 1.0)

    run = rounds(local("on", loss=loss, optimizer="sgd:momentum=0.9"), 4)
    assert [commit.samples for commit, _ in run.script.pushed] == [4, 2, 4, 4]
    assert run.began == [0, 0, 0, 0, 1, 1, 2, 2]
    pushed = b"".join(value for place in range(4) for value in run.bytes_of(place))
    assert np.isfinite(np.frombuffer(pushed, np.float32)).all()


def test_who_leaves_does_not_begin_the_next_round() -> None:
    run = local("on")

    def leave() -> m.Assignment:
        run.trainer.session.leave()
        return given(run, 0)

    run.script.messages += [*run.update(0), leave, m.Outcome(seq=1, decision=m.Decision.ACCEPTED, version=1)]
    assert not run.trainer.run()
    assert run.began == [0, 0]
