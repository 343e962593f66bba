"""Runs a user's task: gradients of samples, reproducible random numbers, evaluations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from ...proto.messages import Assignment
from ..session.replica import Replica
from ..training.nests import to_device
from ..training.sharding import CodedPart, Indices, Shards
from . import Task


class TaskFailedError(Exception):
    """The user's task raised an exception, or its gradients or its loss cannot be used."""


class Computation:
    """A task with the replica that it trains. Every call of the user's code may raise TaskFailedError."""

    def __init__(
        self,
        task: Task,
        replica: Replica,
        device: torch.device,
        seed: int,
        doing: Callable[[str], None],
    ) -> None:
        """
        Args:
            seed: the job's.
            doing: called with the current activity whenever the task makes progress.
        """
        self._doing = doing
        self._task = task
        self._replica = replica
        self._device = device
        self._seed = seed
        self._shards = Shards(seed, replica.manifest.train_samples, task.split)

    def forward(self, indices: Indices, seeds: Sequence[int]) -> torch.Tensor:
        """Clear the gradients, and return the mean loss over some samples, a scalar tensor for `backward`.

        `seeds` seed random numbers such as dropout's, beside the job's seed.
        """
        self._draw(seeds)
        return self._forward(indices)

    def indices(self, assignment: Assignment) -> Indices:
        """Return the indices of an assignment's samples, int64, (samples,); raise TaskFailedError if workers
        have shares of their own and are to compute the same samples."""
        coded = assignment.coding is not None and assignment.coding.redundancy > 1
        if self._task.split is not None and (coded or assignment.stragglers):
            option = "coded:redundancy" if coded else "sync:stragglers"
            raise TaskFailedError(
                f"task {self._task.name!r}: split: each worker has samples of its own, but with --mode "
                f"{option} several workers compute the same ones; leave out split, or choose another mode"
            )
        return self._shards.of(assignment)

    def combined_loss(self, version: int, parts: Sequence[CodedPart]) -> float:
        """Leave in `grad` the sum of the parts' gradients, weighted as the code for stragglers says, by one
        backward pass for each part. Return the mean loss over the parts.
        """
        samples, total = sum(len(part.indices) for part in parts), 0.0
        for number, part in enumerate(parts):
            # Every worker that computes this part draws the same random numbers for it.
            self._draw((version, part.number))
            loss = self.backward(self._forward(part.indices, onto=number > 0), weight=part.weight)
            total += loss * len(part.indices) / samples
        return total

    def _draw(self, seeds: Sequence[int]) -> None:
        (word,) = np.random.SeedSequence([self._seed, *seeds]).generate_state(1).tolist()
        if self._device.type == "cpu" and not torch.cuda.is_initialized():
            torch.default_generator.manual_seed(word)  # without a record of the call's stack for CUDA
        else:
            torch.manual_seed(word)

    def _forward(self, indices: Indices, *, onto: bool = False) -> torch.Tensor:
        """Return the mean loss over some samples; `onto` keeps the gradients of earlier passes."""

        def compute() -> torch.Tensor:
            model = self._replica.model
            model.train()
            if not onto:
                self.drop_gradients()
            self._doing("loading a batch")
            batch = to_device(self._task.batch(indices), self._device)
            self._doing("computing")
            return self._task.loss(model, batch)

        found: torch.Tensor = guarded(f"task {self._task.name!r}", compute)
        return found

    def drop_gradients(self) -> None:
        """Free the gradients' memory, which is as large as the model."""
        for parameter in self._replica.parameters:
            parameter.grad = None

    def backward(self, loss: torch.Tensor, *, weight: float | None = None) -> float:
        """Add the gradients of `loss`, times `weight` (None for 1), to `grad`; return the loss as a number.

        Raises:
            ModelError: the user's code has added, replaced or converted parameters.
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

    def snapshot(self) -> ModelSnapshot:
        """Copy everything that a forward pass changes besides gradients: buffers and random state."""
        return ModelSnapshot(self._replica.model, self._device)

    def evaluate(self) -> dict[str, float]:
        """Return the metrics that the task measures, by name.

        Raises:
            ModelError: the user's code has added, replaced or converted parameters.
        """
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
                raise TypeError(f"expected a mapping of names to numbers, got a {type(found).__name__}")
            measured: Mapping[Any, Any] = found  # pyright: ignore[reportUnknownVariableType]
            return {str(name): float(value) for name, value in measured.items()}

        measured: dict[str, float] = guarded(f"task {self._task.name!r}: evaluate", compute)
        self._replica.check()
        return measured


class ModelSnapshot:
    """Copies of a model's buffers and of torch's random state at one time."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._buffers = [
            (module, name, buffer, buffer.detach().clone())
            for module in model.modules()
            for name, buffer in module.named_buffers(recurse=False)
        ]
        self._device = device if device.type == "cuda" else None
        self._random = torch.get_rng_state()
        self._random_there = torch.cuda.get_rng_state(device) if self._device is not None else None

    def restore(self) -> None:
        """Set the buffers and the random state back to their values at the snapshot."""
        with torch.no_grad():
            for module, name, buffer, value in self._buffers:
                buffer.copy_(value)
                setattr(module, name, buffer)  # the forward pass may have replaced the tensor itself
        torch.set_rng_state(self._random)
        if self._device is not None and self._random_there is not None:
            torch.cuda.set_rng_state(self._random_there, self._device)


def guarded(name: str, compute: Callable[[], Any]) -> Any:
    """Run a user's code, which messages call `name`, such as "task 'digits': evaluate".

    Raises:
        TaskFailedError: the code raised an exception, which is its cause.
    """
    try:
        return compute()
    except (Exception, SystemExit) as error:  # SystemExit too: a task must not end the process silently
        raise TaskFailedError(f"{name} raised {type(error).__name__}: {error}") from error
