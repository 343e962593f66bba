"""Local steps: a worker trains on its own copy for a while, and sends what has changed instead of a gradient.

Each step takes the optimizer's step and pulls towards the model that the round began with (the correction):

    w <- w - step(g) - λ (w - w_global)

The change, w_global - w, takes a gradient's place from there on: it is compressed with its residual, averaged
at the server, weighted by samples, and subtracted. Source: the multi-step paper, with descent and attraction
where its signs are printed the other way round, and the change of all steps where it has the last gradient.

*Delayed* (figure 3b of that paper), a worker does not wait for the exchange. Having pushed its change c_s of
round s, it takes the steps of round s + 1 at once, on the samples that the server says it will have
(`Assignment.next`), from the last global model that it has less its own change:

    x_0 = w_s - c_s
    c_{s+1} = x_0 - x_H, after H steps from x_0
    w_{s+2} = w_{s+1} - outer(mean over workers of c_{s+1})

It pushes c_{s+1} when it has w_{s+1} and the assignment that it expected, and goes on from w_{s+1} -
c_{s+1}. So the steps of a round lack what the others have changed in the round before: a staleness of one
round. With plain averaging and no pull the points at which workers start a round have the mean w_{s+1}, and
each starts the next one at that mean, moved by its own change since: CoCoD-SGD (Shen et al., IJCAI 2019).
Overlap Local-SGD (Wang et al., 2020) is another one: there a worker keeps its model, and is pulled part of
the way to that mean. The pull of a step is towards x_0, what the worker takes the global model to be:
towards w_s it would take back c_s, which is on its way. The learning rate is that of round s, because the
next one is not known by then.

If the server asks for something else, because a worker has come or gone or an evaluation is due, all of
that is undone: parameters, buffers, random numbers, the optimizer's state. The round is then computed as
any other.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...optimizer import Optimizer
from ...proto import messages as m
from ..metrics import Metrics
from ..session.hooks import as_dense
from ..session.session import Session
from .ahead import as_expected, expected_after
from .computation import Computation, Kept
from .gradients import GradientWork
from .sharding import Indices, batches

Changes = Sequence[torch.Tensor | None]


@dataclass(frozen=True, slots=True, eq=False)
class Computed:
    """A round's steps. samples: that they took. loss: mean over those of the first step. seconds: that they
    took."""

    samples: int
    loss: float
    changes: list[torch.Tensor | None]
    seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class Begun:
    """A round computed before its assignment has come. after: id of the one before. kept, optimizer: to be
    put back if it is not asked for."""

    assignment: m.Assignment
    after: int
    computed: Computed
    kept: Kept
    optimizer: Optimizer


class LocalWork(GradientWork):
    """Work `local`: pushes the change of some local steps in place of a gradient."""

    def __init__(
        self,
        session: Session,
        computation: Computation,
        metrics: Metrics,
        training: LocalTraining,
        batch_size: int,
        *,
        delayed: bool = False,
    ) -> None:
        """delayed: begin the next round while the changes of this one are exchanged."""
        super().__init__(session, computation, metrics)
        self._training = training
        self._batch_size = batch_size
        self._least = session.replica.state.least_samples
        self._delayed = delayed
        self._begun: Begun | None = None
        self._changes: Changes | None = None  # of this round; None if they are not pushed

    def told(self, assignment: m.Assignment) -> None:
        begun = self._begun
        if begun is None or assignment.id == begun.after:  # told again: it has been answered
            return
        if not (self._session.is_new(assignment) and as_expected(assignment, begun.assignment)):
            self._give_up_begun()

    def _give_up_begun(self) -> None:
        begun, self._begun = self._begun, None
        if begun is not None:
            self._metrics.ahead.labels("discarded").inc()
            begun.kept.put_back()
            self._training.optimizer = begun.optimizer

    def image(self) -> dict[str, Any]:
        self._give_up_begun()
        return {**super().image(), "optimizer": self._training.optimizer.image()}

    def restore(self, image: Mapping[str, Any]) -> None:
        super().restore(image)
        self._training.optimizer.restore(image["optimizer"])

    def work(self, assignment: m.Assignment) -> None:
        super().work(assignment)
        changes, self._changes = self._changes, None
        if self._delayed and changes is not None and assignment.next and not self._session.leaving:
            self._begin_next(assignment, changes)

    def _begin_next(self, assignment: m.Assignment, changes: Changes) -> None:
        """Compute the round that is expected, from where this one has ended."""
        self._session.doing("computing")
        kept, optimizer = self._computation.keep(), self._training.optimizer
        self._training.optimizer = optimizer.copy()
        expected = expected_after(assignment)
        self._times.begin()
        with self._metrics.during("computing"):
            computed = self._steps_of(expected, changes)
        self._times.forward()
        self._begun = Begun(expected, assignment.id, computed, kept, optimizer)

    def _compute(self, assignment: m.Assignment) -> tuple[int, float, list[torch.Tensor | None] | None]:
        """As for gradients; the loss is over the samples of the first step."""
        begun, self._begun = self._begun, None
        if begun is None:
            self._times.begin()
            computed = self._steps_of(assignment)
        else:
            self._metrics.ahead.labels("used").inc()
            self._times.backward()
            computed = begun.computed
        self._changes, self._computing_s = computed.changes, computed.seconds
        return computed.samples, computed.loss, computed.changes

    def _steps_of(self, assignment: m.Assignment, less: Changes = ()) -> Computed:
        indices = self._computation.indices(assignment)

        def gradients(step: int, batch: Indices) -> float:
            return self._loss(assignment, step, batch)

        parts, began = batches(indices, self._batch_size, self._least), time.perf_counter()
        loss, changes = self._training.change(parts, assignment.learning_rate, gradients, less)
        return Computed(len(indices), loss, changes, time.perf_counter() - began)

    def _reset(self) -> None:
        self._changes = None
        self._training.reset()


class LocalTraining:
    """Trains parameters in place and takes them back. The optimizer's state stays from round to round.

    Attributes:
        optimizer: of the local steps.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], optimizer: Optimizer, correction: float) -> None:
        """
        Args:
            optimizer: of the parameters; it follows the learning rates of assignments.
            correction: λ, 0 to 1.
        """
        self._parameters = parameters
        self._correction = correction
        self.optimizer = optimizer

    def reset(self) -> None:
        """Forget the optimizer's state, after a step that was not finite."""
        self.optimizer = self.optimizer.anew()

    def change(
        self,
        batches: Sequence[Indices],
        learning_rate: float,
        compute_gradients: Callable[[int, Indices], float],
        less: Changes = (),
    ) -> tuple[float, list[torch.Tensor | None]]:
        """Take one step per batch, and put the parameters back to where they were.

        compute_gradients: of the given step's batch, into the parameters' `grad`; returns the mean loss.
        less: what to take off the parameters first, which is no part of the change.
        Returns the loss of the first step, which is that of the model that the round began with, and the
        change: None of a parameter that no step has reached. If a later step's loss is not finite, that one
        is returned instead.
        """
        losses: list[float] = []
        with torch.no_grad():
            before = start = [parameter.detach().clone() for parameter in self._parameters]
            for parameter, each in zip(self._parameters, less, strict=False):
                if each is not None:
                    parameter.sub_(each)
            if less:
                start = [parameter.detach().clone() for parameter in self._parameters]
        self.optimizer.follow(learning_rate)
        reached: set[int] = set()
        for step, batch in enumerate(batches):
            losses.append(compute_gradients(step, batch))
            for place, parameter in enumerate(self._parameters):
                if parameter.grad is not None:
                    parameter.grad = as_dense(parameter.grad)
                    reached.add(place)
            pulls = self._pulls(start) if step and self._correction else ()
            self.optimizer.step()
            with torch.no_grad():
                for parameter, pull in zip(self._parameters, pulls, strict=False):
                    parameter.sub_(pull)
        with torch.no_grad():
            changes: list[torch.Tensor | None] = []
            for place, (parameter, began) in enumerate(zip(self._parameters, start, strict=True)):
                changes.append(began - parameter if place in reached else None)
                parameter.copy_(before[place])
        return next((loss for loss in losses if not math.isfinite(loss)), losses[0]), changes

    def _pulls(self, start: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        with torch.no_grad():
            pairs = zip(self._parameters, start, strict=True)
            return [(parameter - began).mul_(self._correction) for parameter, began in pairs]
