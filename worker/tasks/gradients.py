"""Work `gradients`: the mean gradient of an assignment's samples, or its share of a coded round."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import torch

from ...compressors import NonFiniteGradient
from ...proto import messages as m
from ..metrics import Metrics
from ..session.session import Session
from .computation import Computation
from .sharding import Indices
from .strategy import Strategy

log = logging.getLogger("gradwire.worker")


class GradientWork(Strategy):
    """Work that pushes something else in place of a gradient overrides `_compute`."""

    def __init__(
        self, session: Session, computation: Computation, metrics: Metrics, *, single: bool = False
    ) -> None:
        """
        Args:
            single: whether gradients become versions one at a time, so that a worker may compute at one
                version twice, or not at all.
        """
        super().__init__(session, computation, metrics)
        self._single = single
        self._held = 0  # steps since the last that was pushed
        self._steps = 0

    def work(self, assignment: m.Assignment) -> None:
        session = self._session
        session.doing("computing")
        try:
            with self._metrics.during("computing"):
                samples, loss, gradients = self._compute(assignment)
            if not math.isfinite(loss):
                raise UnusableError(f"the loss is {loss}")
            pushed = self._push(assignment, gradients, samples, loss)
        except (UnusableError, NonFiniteGradient) as error:
            log.warning("version %d: %s; this step contributes nothing", assignment.version, error)
            self._skipped.add(str(error))
            self._reset()
            session.skip(assignment)
            return
        self._skipped.over()
        self._held = 0 if pushed else self._held + 1

    def _push(
        self, assignment: m.Assignment, gradients: Sequence[torch.Tensor], samples: int, loss: float
    ) -> bool:
        """Returns whether something was sent. Raises NonFiniteGradient."""
        session, (version, rank) = self._session, self._place(assignment)
        session.doing("compressing")
        step = self._steps if self._single else assignment.version
        pushing = session.begin_step(assignment, samples, rank=rank, version=version, step=step)
        try:
            for place in reversed(range(len(gradients))):
                pushing.add(place, gradients[place])
        except NonFiniteGradient:
            session.abandon(pushing)
            raise
        self._steps += 1
        return session.commit(pushing, loss)

    def finish(self) -> None:
        if self._held:
            log.warning(
                "the gradients of the last %d steps were held back by the compressor's delay "
                "and are not in the parameters",
                self._held,
            )

    def _compute(self, assignment: m.Assignment) -> tuple[int, float, list[torch.Tensor]]:
        """How many samples are this worker's, their mean loss at the base version, and what to push."""
        indices = self._computation.indices(assignment)
        if assignment.stragglers:
            samples, loss = self._computation.combined_loss(assignment, indices)
        else:
            samples, loss = len(indices), self._loss(assignment, 0, indices)
        return samples, loss, self._session.replica.gradients()

    def _loss(self, assignment: m.Assignment, step: int, indices: Indices) -> float:
        """Of a local step, 0 where there is one only; the gradients are the replica's afterwards."""
        return self._computation.loss(indices, *self._place(assignment), *((step,) if step else ()))

    def _place(self, assignment: m.Assignment) -> tuple[int, int]:
        """What random numbers depend on, besides the job's seed: the version and the place in its round where
        all compute at it together, because ranks are given anew when a worker comes back after its lease, and
        otherwise the assignment."""
        return (assignment.id, 0) if self._single else (assignment.version, assignment.position)

    def _reset(self) -> None:
        """A step was skipped."""


class UnusableError(Exception):
    """A step whose loss is not finite."""
