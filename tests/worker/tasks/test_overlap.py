"""Parts that leave during the backward pass: the same bits, and what cannot be taken back with `both`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import pytest
import torch
from layered import WIDTH, Layers, Overlap, Run, Tied, Twice, squares
from scripted import updates
from torch import nn

from gradwire.common.parts import ALIGNMENT
from gradwire.compressors import AbsentPayload, decode
from gradwire.proto import messages as m
from gradwire.proto.refusal import Reason, Refusal
from gradwire.worker.tasks.computation import TaskFailedError


def late_nan(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Backward is as it should be, but for the first layer, whose gradient comes last."""
    assert isinstance(model, Layers)
    weight: Any = model.first.weight

    def poisoned(gradient: torch.Tensor) -> torch.Tensor:
        return gradient * float("nan")

    weight.register_hook(poisoned)
    return squares(model, batch)


@pytest.mark.parametrize("build", [Layers, Tied])
@pytest.mark.parametrize("compressor", ["none", "4bit", "topk:ratio=8", "topk:ratio=8,clip=0.1"])
def test_what_is_pushed_does_not_depend_on_when_it_leaves(
    build: Callable[[], nn.Module], compressor: str
) -> None:
    """Also of weights that two layers share, and of those that the loss does not reach."""
    runs = [Run(overlap, build, compressor=compressor).steps(3) for overlap in get_args(Overlap)]
    for run in runs:
        assert len(run.script.pushed) == 3
        assert run.script.pushed[0][0].parts == len(run.replica.plan.parts) == len(run.replica.parameters)
    for place in range(3):
        assert runs[0].bytes_of(place) == runs[1].bytes_of(place) == runs[2].bytes_of(place)


@pytest.mark.parametrize("overlap", get_args(Overlap))
@pytest.mark.parametrize("compressor", ["none", "4bit", "topk:ratio=8", "topk:ratio=8,clip=0.1"])
def test_of_what_the_loss_does_not_reach_nothing_is_pushed(compressor: str, overlap: Overlap) -> None:
    run = Run(overlap, compressor=compressor).steps(2)
    unused = len(run.replica.plan.parts) - 1 - 2  # parts come from the last layer on
    for (_, part), (_, payloads) in run.script.parts.items():
        assert all(isinstance(each, AbsentPayload) for each in payloads) == (part == unused)
        assert sum(each.elements for each in payloads) == WIDTH * WIDTH


def test_a_task_keeps_no_gradient_that_is_compressed() -> None:
    kept: list[int] = []

    def counted(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        assert isinstance(model, Layers)
        last: Any = model.first.weight

        def count(gradient: torch.Tensor) -> None:
            kept.append(sum(each.grad is not None for each in model.parameters()))

        last.register_hook(count)
        return squares(model, batch)

    Run("backward", loss=counted).steps()
    assert kept == [0]


def test_a_gradient_that_comes_twice_has_parts_leave_after_backward_from_then_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain, overlapped = Run("off", Twice).steps(2), Run("backward", Twice).steps(2)
    assert caplog.text.count("a gradient arrived twice") == 1
    assert overlapped.script.abandoned == [1]
    assert [commit.samples for commit, _ in overlapped.script.pushed] == [4, 4]
    for place in range(2):
        assert plain.bytes_of(place) == overlapped.bytes_of(place)


def test_where_nothing_can_be_taken_back_a_gradient_that_comes_twice_ends_the_worker() -> None:
    run = Run("both", Twice)
    with pytest.raises(TaskFailedError, match="--overlap off"):
        run.steps()
    assert run.script.pushed == []


@pytest.mark.parametrize("overlap", ["off", "backward"])
def test_a_step_whose_gradient_is_not_finite_is_abandoned_whole(overlap: Overlap) -> None:
    run = Run(overlap, loss=late_nan).steps()
    assert [commit.samples for commit, _ in run.script.pushed] == [0]
    assert not run.residual.any()


def test_where_nothing_can_be_taken_back_the_other_parts_go_empty() -> None:
    whole, run = Run("both").steps(), Run("both", loss=late_nan).steps()
    (commit, _), plan = run.script.pushed[0], run.replica.plan
    assert (commit.samples, commit.parts) == (4, len(plan.parts))
    assert run.empty_parts() == [1, 3], "of the first layer, and of the one that the loss does not reach"
    assert run.script.abandoned == []
    part = plan.parts[-1]
    assert not run.residual[part.start : part.end].any()
    assert torch.equal(run.residual[part.end :], whole.residual[part.end :])
    assert run.residual.isfinite().all()


def test_that_goes_too_where_parts_leave_after_backward() -> None:
    """The model's gradients come twice before any part has left."""
    run = Run("both", loss=late_nan)
    run.trainer._driver.strategy.hooks = None  # pyright: ignore
    run.steps()
    assert run.script.abandoned == []
    assert run.empty_parts() == [len(run.replica.plan.parts) - 1]
    whole, part = Run("both").steps(), run.replica.plan.parts[-1]
    assert torch.equal(run.residual[part.end :], whole.residual[part.end :])


@pytest.mark.parametrize("counted", [(), (0,), (1, 3), (0, 1, 2, 3)])
def test_what_counts_of_a_push_that_is_too_late_is_not_owed_again(counted: tuple[int, ...]) -> None:
    why = Refusal(reason=Reason.STALE, message="no")
    stale = m.Outcome(seq=1, decision=m.Decision.REFUSED, refusal=why, counted=counted)
    before, run = Run("both").steps(), Run("both").steps(1, stale)
    sent, plan = dict[int, np.ndarray[Any, Any]](), run.replica.plan
    for (_, number), (_, payloads) in run.script.parts.items():
        sent[number] = np.concatenate([decode(payload) for payload in payloads])
    for number, part in enumerate(plan.parts):
        expected = before.residual[part.start : part.end].numpy().copy()
        if number not in counted:
            expected += sent[number]
        np.testing.assert_array_equal(run.residual[part.start : part.end].numpy(), expected)
    assert run.script.settled == [1]


def test_work_that_was_done_is_not_asked_for_again_once_the_next_version_is_here() -> None:
    """Its parts come before the push is decided on, and a stream that breaks then has the work told again."""
    run = Run("both")
    told = m.Assignment(id=1, version=0, ranges=(m.Range(start=0, count=4),), world=1)
    run.script.messages += [*updates(run.replica, 0), told, *updates(run.replica, 1), told]
    run.script.messages.append(m.Assignment(id=2, version=1, finished=True))
    run.trainer.run()
    assert len(run.script.pushed) == 1
    assert run.replica.version == 1


@pytest.mark.parametrize("overlap", get_args(Overlap))
@pytest.mark.parametrize("compressor", ["none", "4bit", "topk:ratio=8"])
def test_new_plans_in_the_middle_change_no_bit_of_what_is_pushed(overlap: Overlap, compressor: str) -> None:
    plain, changed = Run("off", compressor=compressor), Run(overlap, compressor=compressor)
    sizes = {1: 1 << 30, 3: 4 * ALIGNMENT, 4: 8 * ALIGNMENT}
    plans = {version: changed.replica.manifest.plan(size) for version, size in sizes.items()}
    assert len({len(plan.parts) for plan in plans.values()}) == 3
    plain.steps(6)
    changed.steps(6, plans=plans)
    assert [commit.parts for commit, _ in changed.script.pushed][:2] == [len(plain.replica.plan.parts), 1]
    for place in range(6):
        assert b"".join(plain.bytes_of(place)) == b"".join(changed.bytes_of(place))
    assert torch.equal(plain.residual, changed.residual)
