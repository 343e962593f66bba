"""Work `gradients`: the mean gradient of an assignment's samples, or its share of a coded round."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...compressors import NonFiniteGradient
from ...proto import messages as m
from ..metrics import Metrics
from ..session.hooks import GradientHooks
from ..session.pushing import Pushing
from ..session.session import Session
from ..session.timing import StepTimes
from .ahead import Ahead, DistrustedError, expected_after, look_ahead
from .computation import Computation, TaskFailedError
from .sharding import Indices
from .strategy import Strategy

log = logging.getLogger("gradwire.worker")


class GradientWork(Strategy):
    """Work that pushes something else in place of a gradient overrides `_compute`."""

    def __init__(
        self,
        session: Session,
        computation: Computation,
        metrics: Metrics,
        *,
        single: bool = False,
        overlap: bool = False,
        final: bool = False,
    ) -> None:
        """
        Args:
            single: whether gradients become versions one at a time, so that a worker may compute at one
                version twice, or not at all.
            overlap: push parts during the backward pass.
            final: whether parts may count before the push is committed, and cannot be taken back.
        """
        super().__init__(session, computation, metrics)
        self._single = single
        self._held = 0  # steps since the last that was pushed
        self._steps = 0
        self._computing_s = 0.0  # of local steps
        self._times = StepTimes(len(session.replica.parameters))
        self._hooks = GradientHooks(session.replica.parameters, self._times) if overlap else None
        self._final = final
        self._looks_ahead = final
        self._ahead: Ahead | None = None

    def told(self, assignment: m.Assignment) -> None:
        if self._ahead is not None and not self._ahead.fits(self._session, assignment):
            self._ahead.kept.put_back()
            self._ahead = None

    def image(self) -> dict[str, Any]:
        if self._ahead is not None:
            self._ahead.kept.put_back()
            self._ahead = None
        return {"held": self._held, "steps": self._steps}

    def restore(self, image: Mapping[str, Any]) -> None:
        self._held, self._steps = image["held"], image["steps"]

    def work(self, assignment: m.Assignment) -> None:
        session = self._session
        session.doing("computing")
        ahead, self._ahead = self._ahead, None
        try:
            if self._hooks is not None and not assignment.stragglers:
                pushed = self._overlapped(assignment, self._hooks, ahead)
            else:
                pushed = self._one_after_the_other(assignment)
        except (UnusableError, NonFiniteGradient) as error:
            log.warning("version %d: %s; this step contributes nothing", assignment.version, error)
            self._skipped.add(str(error))
            self._reset()
            session.skip(assignment)
            return
        self._held = 0 if pushed else self._held + 1
        if self._hooks is not None and self._looks_ahead and assignment.next and not session.leaving:
            self._look_ahead(expected_after(assignment))

    def _look_ahead(self, expected: m.Assignment) -> None:
        """Begin the next forward pass while the update still comes."""
        self._session.doing("computing")
        try:
            with self._metrics.during("computing"):
                place = self._place(expected)
                self._ahead = look_ahead(self._session, self._computation, self._times, expected, *place)
        except DistrustedError as error:
            self._look_ahead_no_more(error)

    def _look_ahead_no_more(self, why: Exception) -> None:
        self._looks_ahead = False
        log.info("from now on a forward pass begins when all of its version is there: %s", why)

    def _overlapped(self, assignment: m.Assignment, hooks: GradientHooks, ahead: Ahead | None) -> bool:
        """Push each part as soon as backward has its last gradient. ahead: the forward pass, if there was
        one."""
        indices = self._computation.indices(assignment) if ahead is None else ahead.indices
        pushing, loss = self._begin(assignment, len(indices)), math.nan
        try:
            hooks.follow(pushing)
            try:
                with self._metrics.during("computing"):
                    passed = ahead.loss if ahead is not None else self._forward(assignment, indices)
                    self._times.backward()
                    loss = self._computation.backward(passed)
            finally:
                missing = hooks.let_go()
            if hooks.error is not None:
                raise hooks.error
            if hooks.repeated:
                raise RepeatedError
            if not math.isfinite(loss):
                raise UnusableError(f"the loss is {loss}")
            for place in missing:  # the loss does not reach them
                pushing.add(place, self._session.replica.gradient(place))
        except TaskFailedError as error:
            if ahead is None or pushing.checksums:
                return self._broken_off(pushing, error, loss)
            self._session.abandon(pushing)  # perhaps autograd has found a parameter that was used too early
            ahead.kept.put_back()
            self._look_ahead_no_more(error)
            return self._overlapped(assignment, hooks, None)
        except Exception as error:
            return self._broken_off(pushing, error, loss)
        return self._commit(pushing, loss)

    def _forward(self, assignment: m.Assignment, indices: Indices) -> torch.Tensor:
        self._times.begin()
        passed = self._computation.forward(indices, *self._place(assignment))
        self._times.forward()
        return passed

    def _broken_off(self, pushing: Pushing, error: Exception, loss: float) -> bool:
        """Some parts may have been sent. Returns whether the step counts."""
        if self._final and pushing.checksums and isinstance(error, UnusableError | NonFiniteGradient):
            log.warning("version %d: %s; some of its parts have left", pushing.assignment.version, error)
            self._skipped.add(str(error))
            pushing.cease()
            self._steps += 1
            return self._session.commit(pushing, loss if math.isfinite(loss) else 0.0)
        if self._final and pushing.checksums and isinstance(error, RepeatedError):
            why = "a gradient came twice in one backward pass, and the first has left"
            raise TaskFailedError(f"{why}: use --overlap off for this model") from None
        self._session.abandon(pushing)
        if not isinstance(error, RepeatedError):
            raise error
        log.warning("a gradient came twice in one backward pass; from now on parts leave after it")
        self._hooks = None
        return self._push(pushing.assignment, pushing.samples, loss)

    def _one_after_the_other(self, assignment: m.Assignment) -> bool:
        with self._metrics.during("computing"):
            samples, loss, gradients = self._compute(assignment)
        if not math.isfinite(loss):
            raise UnusableError(f"the loss is {loss}")
        return self._push(assignment, samples, loss, gradients)

    def _push(
        self,
        assignment: m.Assignment,
        samples: int,
        loss: float,
        gradients: Sequence[torch.Tensor | None] | None = None,
    ) -> bool:
        """gradients: those of the replica if None. Returns whether something was sent. Raises
        NonFiniteGradient."""
        self._session.doing("compressing")
        pushing = self._begin(assignment, samples)
        replica = self._session.replica
        try:
            self._times.gradients([parameter.numel() for parameter in replica.parameters])
            for place in reversed(range(len(replica.parameters))):
                pushing.add(place, replica.gradient(place) if gradients is None else gradients[place])
            self._times.handed()
        except NonFiniteGradient as error:
            return self._broken_off(pushing, error, loss)
        return self._commit(pushing, loss)

    def _begin(self, assignment: m.Assignment, samples: int) -> Pushing:
        version, rank = self._place(assignment)
        step = self._steps if self._single else assignment.version
        return self._session.begin_step(assignment, samples, rank=rank, version=version, step=step)

    def _commit(self, pushing: Pushing, loss: float) -> bool:
        self._skipped.over()
        self._steps += 1
        pushed = self._session.commit(pushing, loss, computing_s=self._computing_s)
        self._times.end()
        if not self._computing_s:  # of local steps the plan knows nothing
            self._session.profile(self._times, pushing)
        return pushed

    def finish(self) -> None:
        if self._held:
            log.warning(
                "the gradients of the last %d steps were held back by the compressor's delay "
                "and are not in the parameters",
                self._held,
            )

    def _compute(self, assignment: m.Assignment) -> tuple[int, float, list[torch.Tensor | None] | None]:
        """How many samples are this worker's, their mean loss at the base version, and what to push: None for
        the gradients of the replica, and in a list for a tensor that has none."""
        indices = self._computation.indices(assignment)
        if assignment.stragglers:
            self._times.begin()
            samples, loss = self._computation.combined_loss(assignment, indices)
        else:
            samples, loss = len(indices), self._computation.backward(self._forward(assignment, indices))
        return samples, loss, None

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


class RepeatedError(Exception):
    """A gradient came twice."""


class UnusableError(Exception):
    """A step whose loss is not finite."""
