"""Features of users' tasks: batches of every kind, sparse gradients, parameters that come and go."""

from __future__ import annotations

import logging
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import pytest
import torch
from layered import INPUTS, WIDTH, Layers, Overlap, Run, squares
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from gradwire.compressors import AbsentPayload
from gradwire.proto.messages import Assignment, Coding, Range
from gradwire.worker.session.replica import ModelError, Replica
from gradwire.worker.tasks import load
from gradwire.worker.tasks.computation import Computation, TaskFailedError
from gradwire.worker.training.nests import to_device

ELSEWHERE = torch.device("meta")


class Pair(NamedTuple):
    x: Tensor
    label: str


class Encoding(UserDict[str, Any]):
    """A batch in the form that tokenizers return."""


class Rows(list[Tensor]):
    pass


@dataclass(frozen=True, slots=True)
class Sample:
    x: Tensor
    inner: Pair
    weight: float = 1.0


ONES = torch.ones(2)
PAIR = Pair(ONES, "one")


CASES: list[tuple[Any, Callable[[Any], list[Tensor]]]] = [
    (ONES, lambda batch: [batch]),
    ((ONES, 3, "text", None), lambda batch: [batch[0]]),
    ([ONES, (ONES,)], lambda batch: [batch[0], batch[1][0]]),
    ({"x": ONES, "n": 3}, lambda batch: [batch["x"]]),
    (PAIR, lambda batch: [batch.x]),
    (Rows([ONES]), lambda batch: [batch[0]]),
    (Encoding(x=ONES, n=3), lambda batch: [batch["x"]]),
    (OrderedDict(x=ONES, y=[ONES]), lambda batch: [batch["x"], batch["y"][0]]),
    (defaultdict(list[Tensor], x=[ONES]), lambda batch: [batch["x"][0]]),
    (Sample(ONES, PAIR), lambda batch: [batch.x, batch.inner.x]),
    (torch.ones(2, 2).max(dim=0), lambda batch: [batch.values, batch.indices]),
    (pack_sequence([torch.ones(3), torch.ones(2)]), lambda batch: [batch.data]),
    ({"deep": [Encoding(pair=PAIR)]}, lambda batch: [batch["deep"][0]["pair"].x]),
]


@pytest.mark.parametrize(("batch", "tensors"), CASES)
def test_all_tensors_of_a_batch_move_and_everything_stays_of_its_type(
    batch: Any, tensors: Callable[[Any], list[Tensor]]
) -> None:
    moved = to_device(batch, ELSEWHERE)
    assert type(moved) is type(batch)
    assert {each.device for each in tensors(moved)} == {ELSEWHERE}
    assert {each.device.type for each in tensors(batch)} == {"cpu"}, "the task's own is as it was"
    if not isinstance(batch, Tensor | PackedSequence):
        assert to_device(batch, torch.device("cpu")) is batch


def test_what_goes_with_the_tensors_stays() -> None:
    moved: Any = to_device({"x": ONES, "sample": Sample(ONES, PAIR, 0.5)}, ELSEWHERE)
    assert (moved["sample"].weight, moved["sample"].inner.label) == (0.5, "one")
    default = to_device(defaultdict(list[Tensor], x=[ONES]), ELSEWHERE)
    assert default["other"] == []
    assert to_device(MappingProxyType({"x": ONES, "n": 3}), ELSEWHERE)["n"] == 3


class Embedded(Layers):
    """Its first layer is a table of which a step reaches some rows, several times."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.first = nn.Embedding(WIDTH, WIDTH, sparse=sparse)  # type: ignore[assignment]  # pyright: ignore

    def forward(self, batch: Tensor) -> Tensor:
        rows = (batch[:, :8] * 4).long().abs() % WIDTH
        scores: Tensor = self.third(torch.tanh(self.second(self.first(rows).mean(dim=1))))
        return scores


@pytest.mark.parametrize("compressor", ["none", "topk:ratio=8,clip=0.1"])
@pytest.mark.parametrize(
    ("overlap", "work"),
    [
        ("off", "gradients"),
        ("backward", "gradients"),
        ("both", "gradients"),
        ("off", "local:correction=0.1"),
        ("off", "local:delayed=on"),
    ],
)
def test_sparse_gradients_are_pushed_as_dense_ones(overlap: Overlap, work: str, compressor: str) -> None:
    def pushed(sparse: bool) -> list[tuple[float | None, list[bytes]]]:
        build = partial(Embedded, sparse)
        terms: dict[str, Any] = {"optimizer": "adamw"} if "local" in work else {}
        run = Run(overlap, build, compressor=compressor, work=work, batch_size=2, **terms)
        for version in range(3):
            run.script.messages += run.update(version)
            run.script.messages.append(run.given(version, version < 2, learning_rate=0.1))
        return run.steps(0).pushed

    assert pushed(sparse=True) == pushed(sparse=False)


def frozen(layer: str) -> Layers:
    model = Layers()
    model.get_submodule(layer).requires_grad_(False)
    return model


def unfreezes(model: nn.Module, batch: Tensor) -> Tensor:
    model.get_submodule("second").requires_grad_()
    return squares(model, batch)


def grows(model: nn.Module, batch: Tensor) -> Tensor:
    if not hasattr(model, "added"):
        model.added = nn.Linear(WIDTH, WIDTH)
    return squares(model, batch)


@pytest.mark.parametrize("overlap", ["off", "backward", "both"])
@pytest.mark.parametrize(
    ("build", "loss", "message"),
    [
        (partial(frozen, "second"), unfreezes, "'second.weight' requires a gradient now and did not when"),
        (
            Layers,
            grows,
            "'added.weight' was added to the model after the job began, .*where its model is made",
        ),
    ],
)
def test_a_parameter_that_begins_to_train_later_is_refused(
    overlap: Overlap, build: Any, loss: Any, message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        Run(overlap, build, loss).steps(2)


def repoints(model: nn.Module, batch: Tensor) -> Tensor:
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return squares(model, batch)


def converts(model: nn.Module, batch: Tensor) -> Tensor:
    return squares(model.double().float(), batch)


@pytest.mark.parametrize("loss", [repoints, converts])
@pytest.mark.parametrize("overlap", ["off", "backward", "both"])
def test_parameters_that_a_task_points_elsewhere_still_follow_the_server(
    overlap: Overlap, loss: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gradwire")
    expected = Run(overlap).steps(4).pushed
    assert not any("elsewhere" in each for each in caplog.messages)
    assert Run(overlap, loss=loss).steps(4).pushed == expected
    ours = [each for each in caplog.messages if "elsewhere" in each]
    assert ["pointed the data" in each for each in ours] == [True] + [False] * (overlap == "both")
    # A forward pass that begins early may have used the old values.
    assert ("waits until its whole version has arrived: the task points" in ours[-1]) == (overlap == "both")


class Evaluated(Layers):
    """Swaps its parameters when it is to be evaluated, or leaves them in float16."""

    def __init__(self, *, converted: bool = False) -> None:
        super().__init__()
        self._converted = converted

    def train(self, mode: bool = True) -> Self:
        if not mode and self._converted:
            self.half()
        elif not mode:
            repoints(self, INPUTS)
        return super().train(mode)


def test_an_evaluation_may_point_parameters_elsewhere_and_not_convert_them() -> None:
    run = Run("both", Evaluated)
    run.trainer._computation.evaluate()  # pyright: ignore[reportPrivateUsage]
    assert run.steps(3).pushed == Run("both").steps(3).pushed
    run = Run("both", partial(Evaluated, converted=True))
    with pytest.raises(
        ModelError, match=r"'first\.weight' was float32 when the job began, and is float16 now"
    ):
        run.trainer._computation.evaluate()  # pyright: ignore[reportPrivateUsage]


def test_a_task_that_writes_to_parameters_is_told_at_once(caplog: pytest.LogCaptureFixture) -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.no_grad():
            model.get_parameter("second.weight").clamp_(-0.01, 0.01)
        return squares(model, batch)

    Run("backward", loss=loss).steps(3)
    (said,) = [each for each in caplog.messages if "written to" in each]
    assert "has written to 'second.weight' outside of optimizer.step()" in said
    assert "replaced at version 64 at the latest" in said


def test_it_is_refused_at_the_step_at_which_it_shows() -> None:
    began: list[int] = []

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        began.append(1)
        return unfreezes(model, batch) if len(began) == 3 else squares(model, batch)

    run = Run("off", partial(frozen, "second"), loss)
    with pytest.raises(ModelError):
        run.steps(4)
    assert len(run.script.pushed) == 2


@pytest.mark.parametrize("overlap", ["off", "backward"])
def test_a_parameter_may_be_frozen_until_its_turn_comes(overlap: Overlap) -> None:
    """The refusal recommends that."""
    began: list[int] = []

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        began.append(1)
        model.get_submodule("second").requires_grad_(len(began) > 2)
        return squares(model, batch)

    run = Run(overlap, loss=loss, compressor="none").steps(4)
    second = 2  # parts come from the last layer on: third, unused, second, first
    pushed = [run.script.parts[seq, second][1] for seq in (1, 2, 3, 4)]
    absent = [isinstance(payload, AbsentPayload) for (payload,) in pushed]
    assert absent == [True, True, False, False]


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (lambda: nn.Sequential(nn.Linear(WIDTH, 4), nn.LazyLinear(4)), "1.weight"),
        (lambda: nn.Sequential(nn.Linear(WIDTH, 4), nn.LazyBatchNorm1d(affine=False)), "1.running_mean"),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_lazy_module_is_refused_with_the_remedy(model: Callable[[], nn.Module], name: str) -> None:
    with pytest.raises(ModelError, match=rf"'{name}' has no shape yet.* run one batch through the model"):
        Replica(model(), 8)
    made = model()
    made(INPUTS)
    Replica(made, 8)


@pytest.mark.parametrize(
    ("fields", "option"),
    [
        ({"stragglers": 1}, "sync:stragglers"),
        ({"coding": Coding(exchange=1, redundancy=2, senders=(), present=(0, 1))}, "coded:redundancy"),
    ],
)
def test_shares_of_their_own_are_refused_where_workers_compute_the_same_samples(
    fields: dict[str, Any], option: str
) -> None:
    task = load("digits:split=classes:2")
    replica = Replica(task.model(), task.train_samples)
    computation = Computation(task, replica, torch.device("cpu"), 1, lambda _: None)
    assignment = Assignment(id=1, version=1, world=3, ranges=(Range(start=0, count=6),))
    assert len(computation.indices(assignment)) == 6
    with pytest.raises(TaskFailedError, match=f"split: each worker.*--mode {option}.*leave out split"):
        computation.indices(replace(assignment, **fields))
