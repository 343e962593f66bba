"""Local steps: a worker trains on its own copy for a while, and sends what has changed instead of a gradient.

Each step takes the optimizer's step and pulls towards the model that the round began with (the correction):

    w <- w - step(g) - λ (w - w_global)

The change, w_global - w, takes a gradient's place from there on: it is compressed with its residual, averaged
at the server, weighted by samples, and subtracted. Source: the multi-step paper, with descent and attraction
where its signs are printed the other way round, and the change of all steps where it has the last gradient.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import torch

from ...optimizer import Optimizer, parse_optimizer
from ...proto.messages import Assignment
from ..metrics import Metrics
from ..session.session import Session
from .computation import Computation
from .gradients import GradientWork
from .sharding import Indices, batches


class LocalWork(GradientWork):
    """Work `local`: pushes the change of some local steps in place of a gradient."""

    def __init__(
        self,
        session: Session,
        computation: Computation,
        metrics: Metrics,
        training: LocalTraining,
        batch_size: int,
    ) -> None:
        super().__init__(session, computation, metrics)
        self._training = training
        self._batch_size = batch_size

    def _compute(self, assignment: Assignment) -> tuple[int, float, list[torch.Tensor | None] | None]:
        """As for gradients; the loss is over the samples of the first step."""
        indices = self._computation.indices(assignment)

        def gradients(step: int, batch: Indices) -> float:
            return self._loss(assignment, step, batch)

        parts, began = batches(indices, self._batch_size), time.perf_counter()
        loss, changes = self._training.change(parts, assignment.learning_rate, gradients)
        self._computing_s = time.perf_counter() - began
        return len(indices), loss, changes

    def _reset(self) -> None:
        self._training.reset()


class LocalTraining:
    """Trains parameters in place and takes them back. The optimizer's state stays from round to round."""

    def __init__(self, parameters: Sequence[torch.Tensor], optimizer: str, correction: float) -> None:
        """
        optimizer: spec as the server gives it. correction: λ, 0 to 1.
        Raises SpecError for an optimizer that this version does not know.
        """
        self._parameters = parameters
        self._options = parse_optimizer(optimizer)
        self._correction = correction
        self._optimizer = Optimizer(self._options, parameters, 0.0)

    def reset(self) -> None:
        """Forget the optimizer's state, after a step that was not finite."""
        self._optimizer = Optimizer(self._options, self._parameters, 0.0)

    def change(
        self,
        batches: Sequence[Indices],
        learning_rate: float,
        compute_gradients: Callable[[int, Indices], float],
    ) -> tuple[float, list[torch.Tensor | None]]:
        """Take one step per batch, and put the parameters back to where they were.

        compute_gradients: of the given step's batch, into the parameters' `grad`; returns the mean loss.
        Returns the loss of the first step, which is that of the model that the round began with, and the
        change: None of a parameter that no step has reached. If a later step's loss is not finite, that one
        is returned instead.
        """
        losses: list[float] = []
        with torch.no_grad():
            start = [parameter.detach().clone() for parameter in self._parameters]
        self._optimizer.learning_rate = learning_rate
        reached: set[int] = set()
        for step, batch in enumerate(batches):
            losses.append(compute_gradients(step, batch))
            reached.update(place for place, each in enumerate(self._parameters) if each.grad is not None)
            pulls = self._pulls(start) if step and self._correction else ()
            self._optimizer.step()
            with torch.no_grad():
                for parameter, pull in zip(self._parameters, pulls, strict=False):
                    parameter.sub_(pull)
        with torch.no_grad():
            changes: list[torch.Tensor | None] = []
            for place, (parameter, before) in enumerate(zip(self._parameters, start, strict=True)):
                changes.append(before - parameter if place in reached else None)
                parameter.copy_(before)
        return next((loss for loss in losses if not math.isfinite(loss)), losses[0]), changes

    def _pulls(self, start: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        with torch.no_grad():
            pairs = zip(self._parameters, start, strict=True)
            return [(parameter - before).mul_(self._correction) for parameter, before in pairs]
