"""A worker's steps with a model whose layers are parts, driven by a script."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal, cast

import numpy as np
import torch
from scripted import REPLY, Script, updates
from torch import nn
from torch.utils import checkpoint as checkpointing

from gradwire.common.parts import ALIGNMENT, Plan
from gradwire.compressors import LayerRule, decode, parse_compressor
from gradwire.proto import messages as m
from gradwire.proto.job import job_message
from gradwire.settings import JobTerms
from gradwire.worker.metrics import WorkerMetrics
from gradwire.worker.session.connection import Connection
from gradwire.worker.session.receiving import Received
from gradwire.worker.session.replica import Replica
from gradwire.worker.tasks import Task
from gradwire.worker.tasks.trainer import Trainer
from gradwire.worker.training.sharding import epoch_order

WIDTH = 64  # a layer is a part
INPUTS = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(2))
ORDER = epoch_order(7, 0, len(INPUTS))  # of the samples in jobs with the seed 7
USED = 0, 1, 3  # places of the layers that the loss depends on
Overlap = Literal["off", "backward", "both"]
Arrays = np.ndarray[Any, Any]
Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.second = nn.Linear(WIDTH, WIDTH, bias=False)
        self.unused = nn.Linear(WIDTH, WIDTH, bias=False)
        self.third = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.second(torch.tanh(self.first(batch))))
        return cast(torch.Tensor, self.third(hidden))


class Normed(Layers):
    """Has buffers, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.dropout(self.norm(self.first(batch)), 0.3)
        return cast(torch.Tensor, self.third(torch.tanh(self.second(hidden))))


class Tied(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.third.weight = self.first.weight


class Twice(Layers):
    """The gradient of its second layer comes in two pieces, one of them late."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(batch))
        functions: Any = checkpointing
        for _ in range(2):
            hidden = torch.tanh(functions.checkpoint(self.second, hidden, use_reentrant=True))
        return cast(torch.Tensor, self.third(hidden))


def squares(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return torch.mean(torch.square(model(batch)))


class Run:
    """One step of a worker, and what it has pushed."""

    def __init__(
        self,
        overlap: Overlap,
        build: Callable[[], nn.Module] = Layers,
        loss: Loss = squares,
        compressor: str = "topk:ratio=8",
        reversed_parts: bool = False,
        **terms: Any,
    ) -> None:
        """reversed_parts: updates come with the parts of the first layers first. terms: of the job."""
        self.reversed_parts = reversed_parts
        self.began: list[int | None] = []  # the replica's version when a forward pass began
        self.measured: list[float] = []  # the sum of the model's buffers when it was evaluated
        torch.manual_seed(1)
        self.script = Script()

        def noted(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            self.began.append(self.replica.version)
            return loss(model, batch)

        def evaluate(model: nn.Module) -> dict[str, float]:
            self.measured.append(sum(float(each.double().sum()) for each in model.buffers()))
            return {"random": float(torch.rand(()))}

        chosen = Task(
            name="t",
            train_samples=64,
            model=build,
            batch=lambda indices: INPUTS[indices],
            loss=noted,
            evaluate=evaluate,
        )
        self.replica = Replica(chosen.model(), 64)
        self.script.messages.append(self.replica.manifest.plan(4 * ALIGNMENT))
        self.replica.adopt(self.replica.manifest.plan(4 * ALIGNMENT))
        self.first = [value.copy() for value in self.replica.values()]
        self.still = {"unused"}  # layers that no update moves
        terms = {"work": "gradients", "batch_size": 4, "epochs": 9, "overlap": overlap, **terms}
        job = job_message(JobTerms(id="j", **terms))
        self.trainer = Trainer(
            cast("Connection", self.script),
            dataclasses.replace(REPLY, job=job),
            chosen,
            self.replica,
            device=torch.device("cpu"),
            compressor=parse_compressor(compressor),
            rule=LayerRule(),
            metrics=WorkerMetrics(compressor),
        )

    def steps(self, count: int = 1, *more: Any, plans: Mapping[int, Plan] = MappingProxyType({})) -> Run:
        """plans: that come before a version's assignment."""
        plan = self.replica.plan
        for version in range(count):
            self.script.messages += self.update(version, plan)
            if version in plans:
                plan = plans[version]
                self.script.messages.append(plan)
            self.script.messages.append(self.given(version, version + 1 < count))
        self.script.messages += [*more, m.Assignment(id=99, version=count - 1, finished=True)]
        self.trainer.run()
        return self

    def update(self, version: int, plan: Plan | None = None, **changes: Any) -> list[Received]:
        """Each version is a step away from the one before, in what has a gradient."""
        names = [tensor.name.partition(".")[0] for tensor in self.replica.manifest.tensors]
        moving = [name not in self.still for name in names]
        pairs = zip(self.first, moving, strict=True)
        values = [(value.view(np.float32) * (1 + moves * version / 8)).copy() for value, moves in pairs]
        found = updates(self.replica, version, values, of=plan, **changes)
        return found[::-1] if self.reversed_parts else found

    @staticmethod
    def given(version: int, more: bool = True, **changes: Any) -> m.Assignment:
        """more: whether what follows is known."""
        ranges, following = (m.Range(start=4 * each, count=4) for each in (version, version + 1))
        fields: dict[str, Any] = {"id": version + 1, "version": version, "ranges": (ranges,), "world": 1}
        fields["next"] = (following,) if more else ()
        return m.Assignment(**{**fields, **changes})

    def bytes_of(self, place: int = 0) -> list[bytes]:
        return [np.asarray(decode(each)).tobytes() for each in self.script.pushed[place][1]]

    @property
    def pushed(self) -> list[tuple[float | None, list[bytes]]]:
        """Losses and bytes."""
        pairs = enumerate(self.script.pushed)
        return [(commit.loss, self.bytes_of(place)) for place, (commit, _) in pairs]

    @property
    def residual(self) -> torch.Tensor:
        return self.trainer.session.compression.ledger.residual

    def empty_parts(self) -> list[int]:
        return sorted(part for (_, part), (_, payloads) in self.script.parts.items() if not payloads)


def local_run(options: str, compressor: str, overlap: Overlap = "backward", *, world: int = 4) -> Run:
    """A worker of several whose rounds of local steps, by SGD in batches of two, have these options."""
    work = f"local:correction=0.0{',' if options else ''}{options}"
    run = Run(overlap, Layers, squares, compressor, work=work, seed=7, batch_size=2, optimizer="sgd")
    given = run.given
    run.given = lambda *args, **more: given(*args, world=world, **more)  # type: ignore[method-assign]
    return run


def rounds(run: Run, first: int, last: int, rate: float = 0.1) -> Run:
    """Rounds of local steps at some versions, at a rate."""
    for version in range(first, last):
        given = run.given(version, version + 1 < last, learning_rate=rate)
        run.script.messages += [*run.update(version), given]
    return run.steps(0)


def gradients(values: list[np.ndarray[Any, Any]], samples: Any) -> list[np.ndarray[Any, Any]]:
    """The gradients of the layers that are used, of the mean square over samples."""
    model = Layers()
    used = [model.first, model.second, model.third]
    for layer, value in zip(used, values, strict=True):
        layer.weight.data = torch.tensor(value)
    torch.autograd.backward(squares(model, INPUTS[samples]))
    return [np.asarray(layer.weight.grad) for layer in used]


def layers_of(flat: Any) -> Arrays:
    """The layers that are used, (3, WIDTH, WIDTH), of all values end to end."""
    return np.asarray(flat).reshape(4, WIDTH, WIDTH)[list(USED)]


def initial(run: Run) -> Arrays:
    return layers_of(np.concatenate([each.view(np.float32) for each in run.first]))


def sent_in(run: Run, place: int = 0) -> Arrays:
    """The layers of a push, in which the one that is not used is 0."""
    flat = np.concatenate([np.frombuffer(each, np.float32) for each in run.bytes_of(place)])
    assert not flat.reshape(4, -1)[2].any()
    return layers_of(flat)


def stepped(
    start: Arrays, version: int, *, rates: tuple[float, float] = (0.1, 0.1), correction: float = 0.0
) -> Arrays:
    """Two local steps in numpy: w <- w - rate * g - correction * (w - start)."""
    w = start
    for at, rate in zip((4 * version, 4 * version + 2), rates, strict=True):
        g = np.stack(gradients(list(w), ORDER[at : at + 2]))
        w = w - np.float32(rate) * g - np.float32(correction) * (w - start)
    return w
