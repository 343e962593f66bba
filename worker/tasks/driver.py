"""Drives the training steps of a task: computes each batch with the task's code, and passes the result to its
step.

If the server says which samples are likely to follow (`Assignment.next`), the driver begins the next work
early: a forward pass while the update arrives (`ahead`; `--overlap both`), or all of the next round's local
steps (`local:delayed=on`; `worker/training/delayed`). If another assignment arrives, the early work is undone
completely.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ...optim.optimizer import Optimizer
from ...proto import messages as m
from ..metrics import WorkerMetrics
from ..session.replica import as_dense
from ..session.session import Session
from ..training.local import LocalStep, LocalStrategy
from ..training.sharding import Indices, coded_parts
from ..training.step import Strategy, TrainingStep
from ..training.variant import Changes
from .ahead import DistrustedError, Early, expected_after, look_ahead
from .computation import Computation, TaskFailedError

log = logging.getLogger("gradwire.worker")


class WorkersOptimizer:
    """The job's optimizer where workers take its steps; a `LocalOptimizer` and a
    `TensorOptimizer`.

    Attributes:
        optimizer: optimizer of the replica's parameters; the driver sets its learning rates from assignments.
    """

    def __init__(self, optimizer: Optimizer, parameters: Sequence[torch.Tensor]) -> None:
        self.optimizer = optimizer
        self._parameters = parameters

    def step_here(self, evaluate: object) -> None:
        """Take one local step with the gradients in `grad`, sparse ones made dense."""
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad = as_dense(parameter.grad)
        self.optimizer.step()

    def step_copy(self, index: int, parameter: torch.Tensor, gradient: torch.Tensor) -> Callable[[], None]:
        """Step a copy of one parameter; return a function that takes the optimizer's state back."""
        before = self.optimizer.copy_memory(index)
        self.optimizer.step_copies([index], [parameter], [gradient])
        return partial(self.optimizer.restore_memory, index, before)

    def copy_state(self) -> Any:
        return self.optimizer.image()

    def restore_state(self, state: Any) -> None:
        self.optimizer.restore(state)


class TaskDriver:
    """Answers assignments with a task, one after the other. The trainer creates and calls it."""

    def __init__(
        self,
        session: Session,
        computation: Computation,
        metrics: WorkerMetrics,
        strategy: Strategy,
        *,
        optimizer: WorkersOptimizer | None = None,
        delayed: bool = False,
    ) -> None:
        """
        Args:
            strategy: takes the steps of the job's kind of work.
            optimizer: takes local steps; None if the work has none.
            delayed: True if the next round's local steps begin while this round's change is exchanged.
        """
        self.strategy = strategy
        self._session = session
        self._computation = computation
        self._metrics = metrics
        self._optimizer = optimizer
        self._delayed = delayed
        self._looks_ahead = strategy.final
        self._early: Early | None = None

    def undo_unexpected(self, assignment: m.Assignment) -> None:
        """Call first for each assignment: undo early work unless `assignment` asks for it."""
        early = self._early
        if early is None or assignment.id == early.after:  # an answered assignment was sent again
            return
        if not early.fits(self._session, assignment):
            self._undo_early()

    def image(self) -> dict[str, Any]:
        """Undo early work and return the strategy's state between two steps, for a later `restore`."""
        self._undo_early()
        return self.strategy.image()

    def work(self, assignment: m.Assignment) -> None:
        """Compute and answer an assignment, and begin the next one early if the job allows it.

        Raises:
            TaskFailedError: the task raised an exception, or too many steps in a row were not finite.
        """
        session = self._session
        session.doing("computing")
        early, self._early = self._early, None
        step: TrainingStep
        if early is not None and early.step is not None:
            self._metrics.ahead.labels("used").inc()
            step = early.step
            usable = early.step.answer(assignment)
        else:
            with self._metrics.during("computing"):
                step, usable = self._compute(assignment, early)
        if not usable or not assignment.next or session.leaving:
            return
        if self._delayed and isinstance(step, LocalStep) and step.changes is not None:
            self._begin_round(assignment, step.changes)
        elif self._looks_ahead and self.strategy.hooks is not None:
            self._look_ahead(assignment)

    # ---- inside

    def _compute(self, assignment: m.Assignment, early: Early | None) -> tuple[TrainingStep, bool]:
        """Compute and answer a step, whose forward pass may be `early`; True if the answer contributes."""
        indices = self._computation.indices(assignment)
        if assignment.stragglers:
            return self._compute_combined(assignment, indices)
        step, usable = self.strategy.begin(assignment, len(indices)), True
        try:
            while step.open:
                if self._optimizer is not None:
                    self._optimizer.optimizer.follow(step.learning_rate)
                passed = self._forward(step, indices) if early is None else early.forward_loss
                step.follow()
                try:
                    loss = self._computation.backward(passed)
                except TaskFailedError as error:
                    # Autograd may have found that the early pass used a parameter before its update arrived.
                    if early is None or step.sent:
                        raise
                    step.withdraw()
                    early.undo()
                    early = None
                    self._stop_looking_ahead(error)
                    continue
                early = None  # only the first batch was begun early
                usable = step.push(loss)
                self._computation.drop_gradients()  # before the update arrives
        except Exception:
            step.withdraw()
            raise
        return step, usable

    def _compute_combined(self, assignment: m.Assignment, indices: Indices) -> tuple[TrainingStep, bool]:
        """Compute and answer a step that is coded for stragglers: a weighted sum over parts."""
        parts = coded_parts(indices, assignment)
        step = self.strategy.begin(assignment, sum(len(part.indices) for part in parts))
        self.strategy.times.begin()
        return step, step.push(self._computation.combined_loss(assignment.version, parts))

    def _forward(self, step: TrainingStep, indices: Indices) -> torch.Tensor:
        """Return the loss of the step's current batch, and measure the pass."""
        times = self.strategy.times
        times.begin()
        passed = self._computation.forward(indices[step.batch], step.seeds)
        times.forward()
        return passed

    # ---- work that is begun early

    def _look_ahead(self, assignment: m.Assignment) -> None:
        """Begin the next forward pass while its update arrives."""
        expected = expected_after(assignment)
        self._session.doing("computing")
        try:
            with self._metrics.during("computing"):
                self._early = look_ahead(
                    self._session,
                    self._computation,
                    self.strategy.times,
                    expected,
                    self.strategy.first_batch,
                    after=assignment.id,
                    seeds=self.strategy.seeds(expected),
                )
        except DistrustedError as error:
            self._stop_looking_ahead(error)

    def _stop_looking_ahead(self, why: Exception) -> None:
        """Begin no more forward passes early in this job, and log why."""
        self._looks_ahead = False
        log.info("from now on each forward pass waits until its whole version has arrived: %s", why)

    def _begin_round(self, assignment: m.Assignment, less: Changes) -> None:
        """Take the local steps of the round expected after `assignment` now, from this worker's end of the
        current round, whose change is `less`."""
        assert isinstance(self.strategy, LocalStrategy)
        assert self._optimizer is not None
        mine, snapshot, before = self._optimizer, self._computation.snapshot(), self._optimizer.optimizer
        mine.optimizer = before.copy()

        def undo() -> None:
            self._metrics.ahead.labels("discarded").inc()
            snapshot.restore()
            mine.optimizer = before

        self._session.doing("computing")
        expected = expected_after(assignment)
        with self._metrics.during("computing"):
            indices = self._computation.indices(expected)
            step = self.strategy.begin_early(expected, len(indices), less)
            while step.open:
                mine.optimizer.follow(step.learning_rate)
                step.push(self._computation.backward(self._forward(step, indices)))
        undone = self._session.replica.undone
        self._early = Early(expected, assignment.id, undone, undo, step=step)

    def _undo_early(self) -> None:
        early, self._early = self._early, None
        if early is not None:
            early.undo()
