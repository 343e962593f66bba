"""The assignments of a script's worker: what the server wants next, and what it was told of the last.

The script runs its own loop, so an assignment can ask for something that only the loop's end can give. The
loop over batches (`Job.batches`) looks at the *present* assignment, the last one that is not answered:

| the present assignment | what happens |
|---|---|
| none | the worker waits for one (`wait`) |
| has samples of this epoch | a batch is yielded; `optimizer.step()` answers it, then `settle` waits |
| has samples of another epoch | the loop over batches ends; `turn_over` moves to that epoch |
| asks for an evaluation | with samples, it is reported at once; without, the loop over batches ends |
| finishes the job | all loops end |

The script evaluates between two loops over batches, when `evaluating` says so. `turn_over`, at the start of
the next loop, reports what was logged. An assignment that is sent again after it was answered asks for
nothing, but an evaluation in it is reported again.
"""

from __future__ import annotations

import math
from contextlib import ExitStack

from ...proto import messages as m
from ..session.session import Session
from ..training.gradients import GradientStrategy
from ..training.local import LocalStrategy
from .length import JobLength
from .membership import Membership

POLL_S = 1.0


class Assignments:
    """The assignments of one worker, from the first batch on.

    Attributes:
        present: see the head of this file.
        epoch: the epoch that the script trains on.
        logged: by name, sum and number of what the script has logged in this epoch.
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
        self.session, self.strategy = session, strategy
        self.present: m.Assignment | None = None
        self.epoch, self.logged = epoch, logged
        self._member, self._length = member, length
        self._reported = m.Evaluation(version=0, epoch=0, metrics={})  # the last one
        self._evaluation = ExitStack()  # while the script may evaluate

    @property
    def evaluating(self) -> bool:
        """Whether the present assignment asks for metrics that were not reported yet."""
        return self.present is not None and self.present.evaluate_epoch > self._reported.epoch

    def settle(self) -> None:
        """Wait for what follows the assignment that was answered, or until this worker's state is due to be
        written: that has to wait for what the script does after its step."""
        self.present = None
        while self.present is None and not self.session.saving.due:
            self._take()

    def wait(self) -> m.Assignment:
        """Return what the server wants next, in place of the present assignment."""
        self.present = None
        while self.present is None:
            self.session.saving.write()
            self._take()
        return self.present

    def turn_over(self) -> None:
        """Report an evaluation that is asked for; if the epoch is over, begin the next one."""
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
        """Let the script evaluate. If the server has asked for it, the model is the one that it has."""
        self.session.doing("evaluating" if self.evaluating else "between epochs")
        if self.evaluating and self.present is not None:
            self._evaluation.close()
            self._evaluation.enter_context(self.session.evaluated(self.present.evaluate_epoch))

    def report(self, assignment: m.Assignment) -> None:
        """Tell the server the means of what was logged, if it asks for them and they are new."""
        epoch = assignment.evaluate_epoch
        if epoch <= self._reported.epoch:
            return
        means = {name: total / count for name, (total, count) in self.logged.items()}
        finite = {name: value for name, value in means.items() if math.isfinite(value)}
        self._reported = m.Evaluation(version=assignment.version, epoch=epoch, metrics=finite)
        self.session.report(self._reported)

    def _take(self) -> None:
        """Wait for a while for the next assignment."""
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
