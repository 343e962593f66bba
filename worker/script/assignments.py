"""The assignments of a script's worker: which one is present, and how the loops treat it.

The script runs its own loop, so an assignment can ask for something that only the loop's end can give. The
loop over batches (`Job.batches`) looks at the *present* assignment, the last one that is not answered:

| the present assignment | effect |
|---|---|
| none | the worker waits for one (`wait`) |
| has samples of this epoch | a batch is yielded; `optimizer.step()` answers it, then `settle` waits |
| has samples of another epoch | the loop over batches ends; `turn_over` moves to that epoch |
| asks for an evaluation | with samples, it is reported at once; without, the loop over batches ends |
| finishes the job | all loops end |

The script evaluates between two loops over batches, when `evaluating` is True. `turn_over`, at the start of
the next loop, reports the logged numbers. An assignment that is sent again after it was answered asks for
nothing, except that an evaluation in it is reported again.
"""

from __future__ import annotations

import math
from contextlib import ExitStack

from ...proto import messages as m
from ..session.session import Session
from ..training.gradients import GradientStrategy
from ..training.local import LocalStrategy
from . import process
from .length import JobLength
from .membership import Membership

POLL_S = 1.0


class Assignments:
    """The assignments of one script's worker, from its first batch on. `Job` makes and drives it.

    Attributes:
        session, strategy: this worker's part in the job, and how its steps are taken.
        present: the last assignment that is not answered; None while the worker waits for one.
        epoch: epoch that the script trains on, from 0.
        logged: sum and count of the numbers that the script has logged in this epoch, by name.
    """

    def __init__(
        self,
        member: Membership,
        session: Session,
        strategy: GradientStrategy | LocalStrategy,
        length: JobLength,
        *,
        epoch: int,
        logged: dict[str, list[float]],
    ) -> None:
        """
        Args:
            member: this script's membership; `done` is set at the end of the job.
            session: this worker's session.
            strategy: how steps are taken.
            length: length of the job, updated from each assignment.
            epoch: first epoch to train on, from 0.
            logged: sum and count of the numbers logged so far, by name; shared with the job.
        """
        self.session, self.strategy = session, strategy
        self.present: m.Assignment | None = None
        self.epoch, self.logged = epoch, logged
        self._member, self._length = member, length
        self._reported = m.Evaluation(version=0, epoch=0, metrics={})  # the last report
        self._evaluation = ExitStack()  # while the script may evaluate

    @property
    def evaluating(self) -> bool:
        """True if the present assignment asks for metrics that were not reported yet."""
        return self.present is not None and self.present.evaluate_epoch > self._reported.epoch

    def settle(self) -> None:
        """Wait for the assignment that follows the answered one, or until this worker's state has to be
        saved.

        The state is saved only after the code that the script runs after its step.
        """
        self.present = None
        while self.present is None and not self.session.saving.due:
            self._take()

    def wait(self) -> m.Assignment:
        """Wait for the next assignment, make it the present one and return it. Saves this worker's state if
        it is due."""
        self.present = None
        while self.present is None:
            self.session.saving.write()
            self._take()
        return self.present

    def turn_over(self) -> None:
        """Report evaluations that are asked for until there are samples or the job ends, and enter their
        epoch."""
        self._evaluation.close()
        self.session.replica.check()
        while self.present is not None and not self._member.done:
            self.report(self.present)
            if self.present.ranges:
                if self.present.epoch != self.epoch:
                    self.epoch = self.present.epoch
                    self.logged.clear()
                return
            self.wait()

    def begin_evaluation(self) -> None:
        """Prepare the model for the script's evaluation. If the server has asked for one, the model gets the
        job's buffers."""
        self.session.doing("evaluating" if self.evaluating else "between epochs")
        if self.evaluating and self.present is not None:
            self._evaluation.close()
            self._evaluation.enter_context(self.session.evaluated(self.present.evaluate_epoch))

    def report(self, assignment: m.Assignment) -> None:
        """Send the server the means of the logged numbers, if `assignment` asks for an evaluation not
        reported yet."""
        epoch = assignment.evaluate_epoch
        if epoch <= self._reported.epoch:
            return
        means = {name: total / count for name, (total, count) in self.logged.items()}
        finite = {name: value for name, value in means.items() if math.isfinite(value)}
        self._reported = m.Evaluation(version=assignment.version, epoch=epoch, metrics=finite)
        self.session.report(self._reported)

    def _take(self) -> None:
        """Wait up to `POLL_S` for an assignment, and make it the present one unless it asks for nothing
        new."""
        if self.session.finished_leaving:
            process.end_if_nothing_is_owed()
        assignment = self.session.next(POLL_S)
        if assignment is None:
            return
        asked = assignment.evaluate_epoch > self._reported.epoch
        if assignment.finished or asked or self.session.is_new(assignment):
            self.present = assignment
            self._length.update(assignment)
            self._member.done = assignment.finished
            if assignment.finished:
                self.strategy.finish()
        elif assignment.evaluate_epoch:  # the report may not have arrived
            self.session.report(self._reported)
