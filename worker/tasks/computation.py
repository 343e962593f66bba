"""Computing with a user's task: gradients of samples, random numbers that repeat, evaluations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from ..session.replica import Replica
from ..training.nests import to_device
from ..training.sharding import CodedPart, Indices, Shards
from . import Task


class TaskFailedError(Exception):
    """The user's task raised, or produces nothing to train with."""


class Computation:
    """A task at a replica. Every call of the user's code may raise TaskFailedError.

    Attributes:
        indices: returns the samples of an assignment.
    """

    def __init__(
        self,
        task: Task,
        replica: Replica,
        device: torch.device,
        seed: int,
        doing: Callable[[str], None],
    ) -> None:
        """doing: called with the activity whenever the task makes progress."""
        self._doing = doing
        self._task = task
        self._replica = replica
        self._device = device
        self._seed = seed
        self.indices = Shards(seed, replica.manifest.train_samples, task.split).of

    def forward(self, indices: Indices, seeds: Sequence[int]) -> torch.Tensor:
        """Return the mean loss over some samples, for `backward`.

        seeds: what random numbers such as dropout's depend on, besides the job's seed.
        """
        self._draw(seeds)
        return self._forward(indices)

    def combined_loss(self, version: int, parts: Sequence[CodedPart]) -> float:
        """Return the mean loss over the parts that this worker computes in a round that is coded for
        stragglers: one backward pass for each part, whose gradients are added up as the code says."""
        samples, total = sum(len(part.indices) for part in parts), 0.0
        for number, part in enumerate(parts):
            # Every worker that computes this part draws the same random numbers for it.
            self._draw((version, part.number))
            loss = self.backward(self._forward(part.indices, onto=number > 0), weight=part.weight)
            total += loss * len(part.indices) / samples
        return total

    def _draw(self, seeds: Sequence[int]) -> None:
        words = np.random.SeedSequence([self._seed, *seeds]).generate_state(1)
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
            ModelError: the model is not the one that the job began with; see `Replica.check`.
        """

        def compute() -> float:
            torch.autograd.backward(loss, None if weight is None else torch.full_like(loss, weight))
            return float(loss.detach())

        value = float(guarded(f"task {self._task.name!r}", compute))
        self._replica.check()
        return value

    def probe(self) -> None:
        """Compute the loss of one sample, so that its operations can be counted."""
        batch = self._task.batch(np.zeros(1, np.int64))
        self._task.loss(self._replica.model, to_device(batch, self._device))
        self._replica.check()

    def keep(self) -> Kept:
        """Keep what a forward pass changes besides gradients."""
        return Kept(self._replica.model, self._device)

    def evaluate(self) -> dict[str, float]:
        """Return what the task measures, by name. Raises ModelError, as `Replica.check` does."""
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
        self._replica.check()
        return measured


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
