"""Changes of local steps that leave during the last backward pass: the same bits, and the rule for values
that are not finite."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast, get_args

import numpy as np
import pytest
import torch
from layered import Layers, Normed, Overlap, Run, Tied, Twice, initial, sent_in, squares, stepped
from torch import nn

from gradwire.proto import messages as m
from gradwire.worker.tasks.computation import TaskFailedError

RATE = 0.1
OPTIMIZERS = ["sgd", "sgd:momentum=0.9,weight_decay=0.01,nesterov=on", "adamw"]


def local(overlap: Overlap, build: Any = Normed, batch_size: int = 2, **terms: Any) -> Run:
    """Rounds of 4 samples: of two steps, unless `batch_size` is 4."""
    terms = {"work": "local:correction=0.1,delayed=off", "seed": 7, "compressor": "none", **terms}
    return Run(overlap, build, batch_size=batch_size, **terms)


def rounds(run: Run, count: int) -> Run:
    for version in range(count):
        given = run.given(version, version + 1 < count, learning_rate=RATE)
        run.script.messages += [*run.update(version), given]
    return run.steps(0)


def poisoned(steps: tuple[int, ...], value: float = math.nan) -> Callable[[nn.Module, torch.Tensor], Any]:
    """Return a loss whose gradient of the first layer, which comes last, is multiplied by `value` at some
    steps."""
    taken: list[int] = []

    def factor(gradient: torch.Tensor) -> torch.Tensor:
        return gradient * (value if len(taken) - 1 in steps else 1.0)

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        assert isinstance(model, Layers)
        if not taken:
            weight: Any = model.first.weight
            weight.register_hook(factor)
        taken.append(1)
        return squares(model, batch)

    return loss


class Turns(Layers):
    """Only every second pass reaches the second layer."""

    passes = 0

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        hidden = torch.tanh(self.first(batch))
        return cast(torch.Tensor, self.third(torch.tanh(self.second(hidden)) if self.passes % 2 else hidden))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("correction", [0.0, 0.5])
@pytest.mark.parametrize("compressor", ["none", "4bit", "topk:ratio=8"])
def test_changes_do_not_depend_on_when_they_leave(compressor: str, correction: float, optimizer: str) -> None:
    """Also of a weight that two layers share, of a layer that the loss does not reach, and with buffers and
    random numbers."""
    for build in (Normed, Tied, Turns):
        terms: dict[str, Any] = {
            "compressor": compressor,
            "optimizer": optimizer,
            "work": f"local:correction={correction},delayed=off",
        }
        runs = [rounds(local(overlap, build, **terms), 4) for overlap in get_args(Overlap)]
        for run in runs:
            assert len(run.script.pushed) == 4
            assert run.pushed == runs[0].pushed
            assert torch.equal(run.residual, runs[0].residual)
            assert run.script.abandoned == []


def test_an_overlapped_round_takes_the_steps_of_the_formula() -> None:
    """w <- w - step(g) - λ (w - w_global), and the change is w_global - w."""
    run = rounds(local("both", Layers), 3)
    for version in range(3):
        start = initial(run) * np.float32(1 + version / 8)
        change = start - stepped(start, version, correction=0.1)
        np.testing.assert_allclose(sent_in(run, version), change, rtol=1e-3, atol=1e-6)


def test_the_first_pass_of_the_next_round_begins_while_its_update_arrives() -> None:
    off, both = rounds(local("off"), 3), rounds(local("both"), 3)
    assert off.began == [0, 0, 1, 1, 2, 2]
    assert both.began == [0, 0, 0, 1, 1, 2]
    assert both.pushed == off.pushed


def test_parts_leave_before_backward_has_ended() -> None:
    """And the parameters keep their values until then."""
    cases: list[tuple[Overlap, int]] = [("off", 0), ("backward", 2)]
    for overlap, expected in cases:
        run = local(overlap, Layers)
        seen: list[int] = []
        weight: Any = run.replica.parameters[0]

        def hook(_: torch.Tensor, run: Run = run, seen: list[int] = seen) -> None:
            seen.append(len(run.script.parts))

        weight.register_hook(hook)
        rounds(run, 1)
        assert seen == [0, expected]
        assert all(np.array_equal(*pair) for pair in zip(run.replica.values(), run.first, strict=True))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("steps", [(0,), (1,), (0, 1), (1, 2)])
def test_a_step_that_is_not_finite_is_left_out_as_without_overlap(
    steps: tuple[int, ...], optimizer: str
) -> None:
    overlaps: list[Overlap] = ["off", "backward"]
    runs = [
        rounds(local(overlap, Layers, loss=poisoned(steps), optimizer=optimizer), 3) for overlap in overlaps
    ]
    assert runs[0].pushed == runs[1].pushed
    samples = [[commit.samples for commit, _ in run.script.pushed] for run in runs]
    assert samples[0] == samples[1]
    assert samples[0][0] == 4 - 2 * len({0, 1} & {*steps})


def test_where_parts_count_the_last_step_is_left_out_for_those_that_have_not_left() -> None:
    whole = rounds(local("both", Layers), 2)
    cut = rounds(local("both", Layers, loss=poisoned((1,))), 2)
    assert [commit.samples for commit, _ in cut.script.pushed] == [4, 4]
    assert cut.script.abandoned == []
    assert cut.empty_parts() == []
    one = rounds(local("off", Layers, loss=poisoned((1,))), 1)  # its first step only
    parts = len(cut.replica.plan.parts)
    mine, all_of, first = (run.bytes_of(0) for run in (cut, whole, one))
    assert len(mine) == parts
    changed = [place for place in range(parts) if mine[place] != all_of[place]]
    assert len(changed) == 1
    assert mine[changed[0]] == first[changed[0]]


def test_where_parts_count_and_there_was_no_earlier_step_the_others_go_empty() -> None:
    run = rounds(local("both", Layers, batch_size=4, loss=poisoned((0,))), 1)
    assert [commit.samples for commit, _ in run.script.pushed] == [4]
    assert run.empty_parts() == [1, 3], "of the first layer, and of the one that the loss does not reach"


def test_a_gradient_that_comes_twice_ends_the_overlap_or_the_worker(caplog: pytest.LogCaptureFixture) -> None:
    for optimizer in OPTIMIZERS:
        plain = rounds(local("off", Twice, optimizer=optimizer), 2)
        overlapped = rounds(local("backward", Twice, optimizer=optimizer), 2)
        assert plain.pushed == overlapped.pushed
        assert overlapped.script.abandoned == [1]
    assert caplog.text.count("a gradient arrived twice") == len(OPTIMIZERS)
    with pytest.raises(TaskFailedError, match="--overlap off"):
        rounds(local("both", Twice), 1)


def test_a_round_of_another_length_than_expected_has_the_same_bits() -> None:
    """The loss may change the number of adaptive steps."""
    found: list[Any] = []
    for overlap in get_args(Overlap):
        run = local(overlap)
        longer = run.given(1, False, learning_rate=RATE, ranges=(m.Range(start=4, count=6),))
        given = run.given(0, learning_rate=RATE)
        run.script.messages += [*run.update(0), given, *run.update(1), longer]
        run.steps(0)
        found.append(run.pushed)
        assert len(run.pushed) == 2
    assert found[0] == found[1] == found[2]
