"""The assignments of a script's worker: which one is present, and how the loops treat it.

The script runs its own loop, so an assignment can ask for something that only the loop's end can give. The
loop over batches (`Job.batches`) looks at the *present* assignment, the last one that is not answered:

| the present assignment | effect |
|---|---|
| none | the worker waits for one (`wait`) |
| has samples of this epoch | a batch is yielded; `optimizer.step()` answers it, then `settle` waits |
| has no batches left, and the script has not stepped | `ask` asks for more: they come, or its work ends |
| has samples of another epoch | the loop over batches ends; `turn_over` moves to that epoch |
| asks for an evaluation | with samples, it is reported at once; without, the loop over batches ends |
| says that training is over | the loop over batches ends; the loop over epochs waits for the evaluation |
| finishes the job | all loops end |

The script evaluates between two loops over batches, when `evaluating` is True. `turn_over`, at the start of
the next loop, reports the logged numbers. An assignment that is sent again after it was answered asks for
nothing, except that an evaluation in it is reported again.

A script may have several jobs, and step each in turn. So `settle`, which is a part of `optimizer.step()`,
must not wait for another member's evaluation: that member may wait for this one's step in another job. The
server therefore says that training is over as soon as it is.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from ...proto import messages as m
from ...proto.refusal import Reason, Refused
from ..session.session import Session
from ..training.gradients import GradientStrategy
from ..training.local import LocalStrategy
from ..training.step import TrainingStep
from . import process
from .length import JobLength
from .membership import Membership

log = logging.getLogger("gradwire.worker")

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
            member: its `done` is set at the end of the job.
            length: updated from each assignment.
            logged: shared with the driver, which adds to it.
        """
        self.session, self.strategy = session, strategy
        self.present: m.Assignment | None = None
        self.epoch, self.logged = epoch, logged
        self._member, self._length = member, length
        self._reported = m.Evaluation(version=0, epoch=0, metrics={})  # the last report
        self._evaluation = ExitStack()  # while the script may evaluate
        self._known = 0  # number of the last evaluation whose metrics every worker of this version has
        self._offered = False  # True if the script could evaluate since the present assignment arrived

    @property
    def evaluating(self) -> bool:
        """True if the present assignment asks for metrics that were not reported yet."""
        return self.present is not None and self._asks(self.present)

    def _asks(self, assignment: m.Assignment) -> bool:
        """Return True if an assignment asks for an evaluation that this worker has not reported. A report of
        a later version than the assignment's does not count: the server has lost that version."""
        last, epoch = self._reported, assignment.evaluate_epoch
        return epoch > last.epoch or (epoch > 0 and last.version > assignment.version)

    @property
    def evaluations(self) -> Sequence[Mapping[str, float]]:
        """Metrics of the evaluations that were done when the work of the present version was assigned, oldest
        first: the same for all workers of that version."""
        results = self.session.evaluations
        return [results[number].metrics for number in sorted(results) if number <= self._known]

    def settle(self) -> None:
        """Wait for the next assignment, or until this worker's state is due to be saved.

        `settle` does not save the state itself, because it runs within the script's `optimizer.step()`: the
        saved state has to include changes by the code that follows. The next `wait` saves it.
        """
        self.present = None
        while self.present is None and not self.session.saving.due:
            self._take()

    def wait(self) -> m.Assignment:
        """Wait for the next assignment and return it. Saves this worker's state if it is due."""
        self.present = None
        while self.present is None:
            self.session.saving.write()
            self._take()
        return self.present

    def ask(self, step: TrainingStep) -> None:
        """Ask for further batches of a step that lacks one, and continue or end the step as the answer says.

        The state of this worker is not saved meanwhile, because the step is half done.
        """
        step.request()
        self.present = None
        while self.present is None:
            self._take()
        if self.present.id != step.assignment.id:
            step.end()
        elif self.present.exhausted:
            step.finish()
            self.settle()
        else:
            step.extend(self.present)

    def turn_over(self) -> None:
        """Take assignments, from the present one on, until one has samples or the job ends; enter the epoch
        of the samples. Report each evaluation that an assignment asks for.

        Return early if an assignment asks for an evaluation for which the script has had no time yet: the
        script then evaluates before its next loop.
        """
        self._evaluation.close()
        self.session.replica.check()
        while self.present is not None and not self._member.done:
            if self.evaluating and not self.present.ranges and not self._offered:
                return
            self.report(self.present)
            if self.present.ranges:
                if self.present.epoch != self.epoch:
                    self.epoch = self.present.epoch
                    self.logged.clear()
                return
            self.wait()

    def begin_evaluation(self) -> None:
        """Give the model the job's buffers, if the server has asked for an evaluation."""
        self.session.doing("evaluating" if self.evaluating else "between epochs")
        self._offered = True
        if self.evaluating and self.present is not None:
            self._evaluation.close()
            self._evaluation.enter_context(self.session.evaluated(self.present.evaluate_epoch))

    def report(self, assignment: m.Assignment) -> None:
        """Report the means of the logged numbers, if an assignment asks for them."""
        epoch = assignment.evaluate_epoch
        if not self._asks(assignment):
            return
        means = {name: total / count for name, (total, count) in self.logged.items()}
        finite = {name: value for name, value in means.items() if math.isfinite(value)}
        self._reported = m.Evaluation(version=assignment.version, epoch=epoch, metrics=finite)
        self.session.report(self._reported)

    def report_last(self) -> None:
        """Report the means of the logged numbers, if the script leaves after an evaluation and before its
        next loop."""
        if self.present is not None and self.logged:
            self.report(self.present)

    def _ended_without(self, refused: Refused) -> m.Assignment:
        """Return an assignment that ends the loops, if the server refuses this worker because the job has
        ended; otherwise raise `refused`."""
        if refused.refusal.reason is not Reason.JOB_FINISHED:
            raise refused
        version = self.session.replica.version or 0
        log.warning(
            "%s. This worker was away at the end: its loops end, and its model has the parameters of version "
            "%d; the job's last ones are in the file of gc-server --output",
            *(refused.refusal.message, version),
        )
        return m.Assignment(id=0, version=version, finished=True)

    def _take(self) -> None:
        """Wait up to `POLL_S` for an assignment, and make it the present one unless it asks for nothing
        new."""
        with process.whole():
            self._take_whole()

    def _take_whole(self) -> None:
        if self.session.finished_leaving:
            process.end_if_nothing_is_owed()
        try:
            assignment = self.session.next(POLL_S)
        except Refused as refused:
            assignment = self._ended_without(refused)
        if assignment is None:
            return
        asked = self._asks(assignment)
        ends = assignment.finished or (assignment.trained and not assignment.evaluate_epoch)
        if ends or asked or self.session.is_new(assignment):
            self.present, self._offered = assignment, False
            self._known = max(self._known, assignment.evaluations)
            self._length.update(assignment)
            self._member.done = assignment.finished
            if assignment.finished:
                self.strategy.finish()
                if self.session.replica.version is None:
                    log.warning(
                        "the job has ended before this worker had its parameters: the model still has those "
                        "of the script; the job's last ones are in the file of gc-server --output"
                    )
        elif assignment.evaluate_epoch:  # the report may not have arrived
            self.session.report(self._reported)
