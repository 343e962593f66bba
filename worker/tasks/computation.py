"""Computing with a user's task: gradients of samples, random numbers that repeat, evaluations."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch
from torch import nn

from ...proto import messages as m
from ..metrics import Metrics
from ..session.replica import Replica
from . import Task
from .sharding import Indices, coded_parts, epoch_order, shard

MAX_SKIPPED_STEPS = 10


class TaskFailedError(Exception):
    """The user's task raised, or produces nothing to train with."""


class SkippedSteps:
    """Counts steps in a row without a usable gradient, and gives up after `MAX_SKIPPED_STEPS`."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._in_a_row = 0

    def add(self, why: str) -> None:
        """Raises TaskFailedError if that was one too many."""
        self._metrics.skipped.inc()
        self._in_a_row += 1
        if self._in_a_row >= MAX_SKIPPED_STEPS:
            raise TaskFailedError(
                f"{why} in {self._in_a_row} steps in a row: "
                "lower --learning-rate, or check the data and the loss"
            )

    def over(self) -> None:
        """A step was usable."""
        self._in_a_row = 0


class Computation:
    """A task at a replica. Every call of the user's code may raise TaskFailedError."""

    def __init__(
        self,
        task: Task,
        replica: Replica,
        device: torch.device,
        seed: int,
        doing: Callable[[str], None] | None = None,
    ) -> None:
        """doing: is told whenever the task has got on, and with what."""
        self._doing = doing or _unheard
        self._task = task
        self._replica = replica
        self._device = device
        self._seed = seed
        self._order: tuple[int, Indices] | None = None  # of the last epoch asked for

    def indices(self, assignment: m.Assignment) -> Indices:
        """The samples of an assignment."""
        epoch = assignment.epoch
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, epoch_order(self._seed, epoch, self._replica.manifest.train_samples)
        return shard(self._order[1], assignment)

    def loss(self, indices: Indices, *place: int) -> float:
        """The mean loss over some samples; its gradients are the replica's afterwards.

        place: what random numbers such as dropout's depend on, besides the job's seed.
        """
        self._draw(place)
        return self.backward(self._forward(indices))

    def forward(self, indices: Indices, *place: int) -> torch.Tensor:
        """As `loss`, of which `backward` is the rest."""
        self._draw(place)
        return self._forward(indices)

    def combined_loss(self, assignment: m.Assignment, indices: Indices) -> tuple[int, float]:
        """How many of the samples are this worker's in a round that is coded for stragglers, and the mean
        loss over them. One backward pass for each part; their gradients are added up as the code says."""
        parts = coded_parts(indices, assignment)
        samples = sum(len(part.indices) for part in parts)
        total = 0.0
        for place, part in enumerate(parts):
            # Whoever computes this part draws the same random numbers for it.
            self._draw((assignment.version, part.number))
            loss = self.backward(self._forward(part.indices, onto=place > 0), weight=part.weight)
            total += loss * len(part.indices) / samples
        return samples, total

    def _draw(self, place: tuple[int, ...]) -> None:
        words = np.random.SeedSequence([self._seed, *place]).generate_state(1)
        torch.manual_seed(int(words[0]))

    def _forward(self, indices: Indices, *, onto: bool = False) -> torch.Tensor:
        """onto: keep the gradients that are there."""

        def compute() -> torch.Tensor:
            model = self._replica.model
            model.train()
            for parameter in self._replica.parameters if not onto else ():
                parameter.grad = None
            self._doing("loading a batch")
            batch = to_device(self._task.batch(indices), self._device)
            self._doing("computing")
            return self._task.loss(model, batch)

        found: torch.Tensor = guarded(f"task {self._task.name!r}", compute)
        return found

    def backward(self, loss: torch.Tensor, *, weight: float | None = None) -> float:
        """Add the gradients of a loss to those that are there; returns the loss. weight: of them.

        Raises:
            ModelError: they are of other parameters than those that the job began with.
        """

        def compute() -> float:
            torch.autograd.backward(loss, None if weight is None else torch.full_like(loss, weight))
            return float(loss.detach())

        value = float(guarded(f"task {self._task.name!r}", compute))
        self._replica.check_complete()
        return value

    def probe(self) -> None:
        """The loss of one sample, to see which operations it takes."""
        batch = self._task.batch(np.zeros(1, np.int64))
        self._task.loss(self._replica.model, to_device(batch, self._device))

    def keep(self) -> Kept:
        """What a forward pass changes besides gradients."""
        return Kept(self._replica.model, self._device)

    def evaluate(self) -> dict[str, float]:
        """What the task measures, by name."""
        model = self._replica.model

        def compute() -> dict[str, float]:
            model.eval()
            passes = model.register_forward_pre_hook(lambda model, inputs: self._doing("evaluating"))
            try:
                with torch.no_grad():
                    found: Any = self._task.evaluate(model)
            finally:
                passes.remove()
            if not isinstance(found, Mapping):
                raise TypeError(f"it must return numbers by name, not a {type(found).__name__}")
            measured: Mapping[Any, Any] = found  # pyright: ignore[reportUnknownVariableType]
            return {str(name): float(value) for name, value in measured.items()}

        measured: dict[str, float] = guarded(f"task {self._task.name!r}: evaluate", compute)
        return measured


def _unheard(activity: str) -> None:
    pass


class Kept:
    """A model's buffers and the state of torch's random numbers, to be put back."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._buffers = [
            (module, name, buffer, buffer.detach().clone())
            for module in model.modules()
            for name, buffer in module.named_buffers(recurse=False)
        ]
        self._device = device if device.type == "cuda" else None
        self._random = torch.get_rng_state()
        self._random_there = torch.cuda.get_rng_state(device) if self._device is not None else None

    def put_back(self) -> None:
        with torch.no_grad():
            for module, name, buffer, value in self._buffers:
                buffer.copy_(value)
                setattr(module, name, buffer)  # some are replaced, not written to
        torch.set_rng_state(self._random)
        if self._device is not None and self._random_there is not None:
            torch.cuda.set_rng_state(self._random_there, self._device)


def guarded(what: str, compute: Callable[[], Any]) -> Any:
    """Run a user's code. Raises TaskFailedError with its exception as the cause."""
    try:
        return compute()
    except (Exception, SystemExit) as error:  # a task must not end the process without a word
        raise TaskFailedError(f"{what} raised {type(error).__name__}: {error}") from error


def to_device(batch: Any, device: torch.device) -> Any:
    """Move every tensor in a nest of tuples, lists, mappings and dataclasses, each of which keeps its type;
    what has a method `to` of its own, such as a `PackedSequence`, moves itself. Nothing is changed in place,
    and what has nothing to move is handed back as it is."""
    move: Any = getattr(batch, "to", None)
    if callable(move):
        return move(device)
    members = members_of(batch)
    moved = {key: to_device(value, device) for key, value in members.items()}
    if all(moved[key] is value for key, value in members.items()):
        return batch
    return _with_members(batch, moved)


def members_of(nest: Any) -> dict[Any, Any]:
    """Of a tuple, list, mapping or dataclass: by key, place or field; of what is no nest, none."""
    found: Any = {}
    if isinstance(nest, Mapping):
        found = nest  # pyright: ignore[reportUnknownVariableType]
    elif isinstance(nest, list | tuple):
        found = enumerate(nest)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    elif dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        names = [field.name for field in dataclasses.fields(nest)]
        found = {name: getattr(nest, name) for name in names if hasattr(nest, name)}
    return dict(found)


def _with_members(nest: Any, members: dict[Any, Any]) -> Any:
    """The same kind of nest with other members."""
    make: Any = getattr(nest, "_make", nest.__class__)  # of a namedtuple
    if isinstance(nest, tuple):
        return make(list(members.values()))
    has_items = isinstance(nest, MutableMapping | list)
    if isinstance(nest, Mapping) and not has_items:
        return members
    other: Any = copy.copy(nest)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    for key, value in members.items():
        if has_items:
            other[key] = value
        else:
            object.__setattr__(other, key, value)  # it may be frozen
    return other
