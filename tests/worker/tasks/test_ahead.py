"""Forward passes that begin before their assignment has come: the same bits, and nothing left of those that
were in vain."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from layered import Layers, Normed, Run, Tied, squares
from torch import nn

from gradwire.common.parts import ALIGNMENT
from gradwire.proto import messages as m
from gradwire.proto.refusal import Reason, Refusal, Refused
from gradwire.worker.tasks.computation import TaskFailedError

STEPS = 4
EARLY = [0, *range(STEPS - 1)]  # versions at which passes begin, if each but the first begins early
Build = Callable[[], nn.Module]


class Outside(Layers):
    """Uses the parameters of its layers, and never calls them."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        both = torch.cat([self.first.weight, self.second.weight, self.third.weight])
        return nn.functional.linear(batch, both).tanh() @ both


class Recalled(Layers):
    """Every layer is used twice."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return super().forward(super().forward(batch))


def penalized(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Return a loss with a penalty on a copy of all parameters, which autograd does not compare with what
    they are later."""
    values = nn.utils.parameters_to_vector(model.parameters())
    return values.mean().exp() * squares(model, batch)


def elsewhere(compute: Callable[[], torch.Tensor]) -> torch.Tensor:
    """On another thread, where nobody sees it."""
    found: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: found.append(compute()))
    thread.start()
    thread.join()
    return found[0]


def out_of_sight(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return elsewhere(lambda: squares(model, batch))


def too_early(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """The last layer is used once where nobody sees it, and then again."""
    assert isinstance(model, Layers)
    weight = model.third.weight
    norm = elsewhere(lambda: weight.square().sum())
    return norm * (batch @ weight).square().mean()


def much_too_early(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Gradients of other layers are there before that is found out."""
    assert isinstance(model, Layers)
    norm = elsewhere(lambda: model.first.weight.square().sum())
    return norm * squares(model, batch)


def both(build: Build = Layers, loss: Any = squares, first_layers_first: bool = True, **terms: Any) -> Run:
    return Run("both", build, loss, "none", reversed_parts=first_layers_first, **terms)


def off(build: Build = Layers, loss: Any = squares) -> Run:
    return Run("off", build, loss, "none")


@pytest.mark.parametrize("first_layers_first", [False, True])
@pytest.mark.parametrize(
    ("build", "loss"),
    [(build, squares) for build in (Layers, Tied, Normed, Outside, Recalled)] + [(Layers, penalized)],
)
def test_a_pass_that_begins_early_comes_to_the_same_bits(
    build: Build, loss: Any, first_layers_first: bool
) -> None:
    plain, early = off(build, loss).steps(STEPS), both(build, loss, first_layers_first).steps(STEPS)
    assert plain.began == [*range(STEPS)]
    assert early.began == EARLY
    assert early.pushed == plain.pushed
    for mine, other in zip(early.replica.model.buffers(), plain.replica.model.buffers(), strict=True):
        assert torch.equal(mine, other)


def test_layers_are_computed_while_parts_of_later_ones_are_on_their_way() -> None:
    left: list[int] = []

    class Counted(Layers):
        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            for layer in (self.first, self.second, self.third):
                batch = torch.tanh(layer(batch))
                left.append(len(run.script.messages))
            return batch

    run = both(Counted)
    run.steps(2)
    updates = len(run.replica.plan.parts)
    assert updates == 4
    assert left[3:] == [5, 4, 2], "one part for each, that which nobody uses, and two assignments"


class Cached(Layers):
    """Knows a parameter by another name, from its first forward pass on."""

    def __init__(self) -> None:
        super().__init__()
        self.known: torch.Tensor | None = None

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        if self.known is None:
            self.known = self.unused.weight.detach()
        return super().forward(batch) + batch @ self.known


@pytest.mark.parametrize("build", [Layers, Cached])
def test_a_parameter_that_moves_unseen_ends_early_passes(
    build: Build, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    plain, early = off(build), both(build)
    plain.still = early.still = set()  # as weight decay would
    plain.steps(STEPS)
    early.steps(STEPS)
    assert early.pushed == plain.pushed
    assert caplog.text.count("may use parameters in a way that cannot be observed") == 1


def test_what_is_computed_on_another_thread_is_not_begun_early_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    plain, early = off(loss=out_of_sight).steps(STEPS), both(loss=out_of_sight).steps(STEPS)
    assert early.began == [0, 0, 1, 2, 3]
    assert caplog.text.count("may use parameters in a way that cannot be observed") == 1
    assert early.pushed == plain.pushed


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # that torch.compile itself looks at
@pytest.mark.parametrize("whole", [False, True])
def test_a_compiled_model_waits_for_its_parameters(caplog: pytest.LogCaptureFixture, whole: bool) -> None:
    caplog.set_level("INFO")

    def twice(hidden: torch.Tensor) -> torch.Tensor:
        return torch.tanh(hidden) * 2

    compiled = torch.compile(twice, backend="eager")

    class Within(Layers):
        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return compiled(self.first(batch))

    def build() -> nn.Module:
        layers = Layers()
        if not whole:
            return Within()
        layers.compile(backend="eager")
        return layers

    plain, early = off(build).steps(STEPS), both(build).steps(STEPS)
    assert early.began == ([0, 1, 2, 3] if whole else [0, 0, 1, 2, 3])
    assert caplog.text.count("compiled") == 1
    assert early.pushed == plain.pushed


def test_a_parameter_that_was_used_too_early_is_found_by_autograd(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    plain, early = off(loss=too_early), both(loss=too_early)
    plain.still = early.still = {"unused", "first", "second"}
    plain.steps(STEPS)
    early.steps(STEPS)
    assert early.began == [0, 0, 1, 2, 3]
    assert early.script.abandoned == [2]
    assert "modified by an inplace operation" in caplog.text
    assert early.pushed == plain.pushed


def test_if_parts_have_left_by_then_the_worker_ends() -> None:
    with pytest.raises(TaskFailedError, match="modified by an inplace operation"):
        both(loss=much_too_early).steps(STEPS)


@pytest.mark.parametrize(
    "changes",
    [
        {"ranges": (m.Range(start=40, count=4),)},
        {"ranges": (m.Range(start=4, count=3),)},
        {"epoch": 1},
        {"position": 1},
        {"evaluate_epoch": 1},
        {"parts": (0, 2)},
    ],
)
def test_what_was_begun_in_vain_leaves_nothing(changes: dict[str, Any]) -> None:
    runs = off(Normed), both(Normed)
    for run in runs:
        second = run.given(1, more=False, **changes)
        run.script.messages += [*run.update(0), run.given(0), *run.update(1), second]
        run.steps(0)
    plain, early = runs
    assert (plain.began, early.began) == ([0, 1], [0, 0, 1])
    assert early.pushed == plain.pushed
    assert early.measured == plain.measured
    assert early.script.reports == plain.script.reports
    for mine, other in zip(early.replica.model.buffers(), plain.replica.model.buffers(), strict=True):
        assert torch.equal(mine, other)


def test_a_job_that_ends_instead_leaves_nothing_of_it() -> None:
    runs = off(Normed), both(Normed)
    for run in runs:
        run.script.messages += [*run.update(0), run.given(0), *run.update(1)]
        run.steps(0)
        assert float(cast(Any, run.replica.model.get_buffer("norm.num_batches_tracked"))) == 1


def test_who_takes_a_lost_members_place_goes_back_to_the_version_before() -> None:
    """Two parts of the next version are here, and the first layer has been computed with one."""
    runs = off(Normed), both(Normed)
    for run in runs:
        taken = run.given(0, more=False, id=2, ranges=(m.Range(start=8, count=4),), parts=(0, 1))
        messages = run.script.messages
        messages += [*run.update(0), run.given(0), *run.update(1)[:2], taken, *run.update(1)[2:]]
        messages.append(run.given(1, more=False, id=3))
        run.steps(0)
    plain, early = runs
    assert early.began == [0, 0, 0, 1]
    assert [commit.base_version for commit, _ in early.script.pushed] == [0, 0, 1]
    assert [loss for loss, _ in early.pushed] == [loss for loss, _ in plain.pushed]
    assert early.pushed[2] == plain.pushed[2]
    assert early.pushed[1][1] == plain.pushed[1][1][-2:]


def test_work_told_again_and_parts_that_come_again_change_nothing() -> None:
    """The case is a reconnect."""
    plain, early = off(Normed).steps(2), both(Normed)
    first, *more = early.update(1)
    messages = early.script.messages
    messages += [*early.update(0), early.given(0), first, early.given(0), first, *more, first]
    messages.append(early.given(1, more=False))
    early.steps(0)
    assert early.began == [0, 0, 1]
    assert early.pushed == plain.pushed


@pytest.mark.parametrize("version", [1, 2])
def test_a_snapshot_under_a_new_plan_may_come_in_the_middle(version: int) -> None:
    plain, early = off(Normed), both(Normed)
    plan = early.replica.manifest.plan(8 * ALIGNMENT)
    for run in (plain, early):
        messages = run.script.messages
        messages += [*run.update(0), run.given(0), *(run.update(1)[:2] if run is early else ()), plan]
        messages += run.update(version, plan)
        messages.append(run.given(version, more=False))
        run.steps(0)
    assert early.replica.plan is plan
    assert early.began == [0, 0, version]
    assert early.pushed[0] == plain.pushed[0]
    assert early.pushed[1][0] == plain.pushed[1][0]
    assert b"".join(early.pushed[1][1]) == b"".join(plain.pushed[1][1])


def test_what_ends_the_connection_is_not_taken_for_a_fault_of_the_task() -> None:
    def refuse() -> None:
        raise Refused(Refusal(reason=Reason.FENCED, message="another one has come"))

    def deaf(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        try:
            return squares(model, batch)
        except BaseException:
            return torch.zeros((), requires_grad=True)

    for loss in (squares, deaf):
        run = both(loss=loss)
        run.script.messages += [*run.update(0), run.given(0), *run.update(1)[:1], refuse]
        with pytest.raises(Refused, match="another one has come"):
            run.steps(0)


def test_who_leaves_does_not_wait_for_the_next_version() -> None:
    run = both()

    def leave() -> m.Outcome:
        run.trainer.session.leave()
        return m.Outcome(seq=1, decision=m.Decision.ACCEPTED, version=1)

    run.script.messages += [*run.update(0), run.given(0), *run.update(1)[:1], leave]
    assert not run.trainer.run()
    assert run.script.messages == []


def test_the_last_push_of_who_leaves_may_have_begun_early() -> None:
    run = both()

    def leave() -> None:
        run.trainer.session.leave()

    accepted = [m.Outcome(seq=seq, decision=m.Decision.ACCEPTED, version=seq) for seq in (1, 2)]
    run.script.messages += [*run.update(0), run.given(0), *run.update(1)[:1], leave, *run.update(1)[1:]]
    run.script.messages += [run.given(1), *accepted]
    assert not run.trainer.run()
    assert run.began == [0, 0]
    assert run.pushed == off().steps(2).pushed


def test_time_that_a_pass_waits_for_parameters_is_not_of_computing() -> None:
    run = both()

    def late() -> None:
        time.sleep(0.3)

    run.script.messages += [*run.update(0), run.given(0), late, *run.update(1), run.given(1, more=False)]
    run.steps(0)
    seconds = run.trainer._metrics.seconds  # pyright: ignore[reportPrivateUsage]
    found: dict[str, float] = {
        sample.labels["activity"]: sample.value
        for family in seconds.collect()
        for sample in family.samples
        if sample.name.endswith("_total")
    }
    assert found["waiting"] > 0.3
    assert found["computing"] < 0.2
