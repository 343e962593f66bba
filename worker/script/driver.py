"""Drives training steps (`worker/training/step`) from a script, which owns the loop.

| the script | the driver |
|---|---|
| asks its loop for a batch | `batches` begins the step of the present assignment, or gives its next batch |
| has computed all batches of the step, and not stepped | `batches` asks the server for more of them |
| goes through the model | `forward_passed`: gradients may leave from now on |
| calls `optimizer.step()` | `push`; after an assignment's last batch it waits for the next assignment |
| leaves the loop by `break` or an exception | the next loop gives the batches since the last step again |

`assignments` decides which assignment is next and when the loops end. No assignment is answered twice here:
after its last push the worker waits for the next assignment before `optimizer.step()` returns.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch

from ...common.telemetry import keep_warnings
from ...proto import messages as m
from ...proto.shares import assigned_samples
from ..session.calls import Earlier
from ..training.step import TrainingStep
from ..training.work import Local
from . import process
from .assignments import Assignments
from .attached import Attached
from .length import JobLength
from .membership import Membership
from .schedules import Schedules
from .script_state import copied, random_state, restore_random_state
from .terms import ScriptError, check_alone

log = logging.getLogger("gradwire.worker")

NO_WORK = (
    "optimizer.step(): no batch is open; call it in the loop over job.batches(...), at most once for each "
    "batch; several models take turns. For a last step of fewer batches than the others, call it in the loop "
    "when i + 1 == len(batches)"
)
NEVER_STEPPED = (
    "epoch %d: this worker has computed %d batches, as many as an epoch has, without optimizer.step(), so it "
    "would train nothing: in each epoch call step() of the optimizer that job.attach returned, and do not "
    "change parameters in its place"
)
UNLOGGED = "the server cannot show a training loss: call job.log(loss=loss) before optimizer.step()"


class Driver:
    """The training steps of one script's worker. `Job` makes and drives it.

    Attributes:
        attached: the script's model and optimizer; None before `Job.attach`.
        assignments: assignments of this worker; None before the first batch.
        applied: whether the last `optimizer.step()` counts, as in `Job`.
        start: number of epochs that the script has trained before this job.
        first_epoch: epoch to begin with, from 0; the job may be past it.
        error_before: last exception of the process before the last `optimizer.step()`, or before the job.
        leave_after: leaves the job because of an exception; `Part` sets it.
    """

    leave_after: Callable[[BaseException], None]

    def __init__(self, member: Membership, length: JobLength, schedules: Schedules) -> None:
        self._member, self._length, self._schedules = member, length, schedules
        self.attached: Attached | None = None
        self.assignments: Assignments | None = None
        self.applied = False
        self.start = 0
        self.first_epoch: int = member.owner.get("epoch", member.reply.epoch)
        self.error_before = process.last_error()
        self._random: Mapping[str, Any] | None = member.owner.get("random")  # restored once batches begin
        self._logged: dict[str, list[float]] = {}  # shared with the assignments
        self._step: TrainingStep | None = None  # the last step that was begun
        self._given = False  # True from handing out a batch until `optimizer.step()`
        self._losses: dict[int, float] = {}  # logged since the last optimizer.step(), by batch
        self._unstepped = 0  # batches since then
        self._told_unlogged = False
        self._only_adding = False  # True within `no_sync`: backward passes only add to the gradients
        self._samples_arrived = False  # True once an assignment with samples has arrived

    @property
    def epoch(self) -> int:
        """Present epoch, from 0."""
        return self.first_epoch if self.assignments is None else self.assignments.epoch

    @property
    def open(self) -> bool:
        """True while a step is open."""
        return self._step is not None and self._step.open

    def image(self) -> dict[str, Any]:
        """Return the state that a restarted worker continues from, between two steps."""
        assert self.assignments is not None
        return {
            "epoch": self.epoch,
            "strategy": self.assignments.strategy.image(),
            "logged": deepcopy(self._logged),
            "random": random_state(),
            "unstepped": self._unstepped,
            "gradients": copied([each.grad for each in self.assignments.session.replica.parameters])
            if self._unstepped  # the next epoch's first step adds to them
            else [],
        }

    def begin(
        self, train_samples: int, data: Callable[[], int], image: Callable[[], dict[str, Any]]
    ) -> Assignments:
        """Begin to train with a data set at the first call, and return the assignments; later calls only
        check its size.

        Args:
            train_samples: number of samples in an epoch.
            data: function that computes the checksum of the data set.
            image: function that returns the script's part of the state that this worker saves.
        """
        if self.assignments is not None:
            given = self.assignments.session.replica.manifest.train_samples
            if given != train_samples:
                raise ScriptError(
                    f"job.batches: the data set has {train_samples} samples, but the first one had {given}. "
                    "A job counts the samples of one data set: pass a torch.utils.data.ConcatDataset, or "
                    "draw batches of other data in the loop over this one"
                )
            return self.assignments
        attached, member = self.attached, self._member
        if attached is None:
            raise ScriptError("job.batches: call job.attach(model, optimizer) first")

        def earlier() -> Earlier:
            return Earlier(attached.moments(), epoch=self.start, steps=self._schedules.steps)

        checksum = data()  # reads the data set: Ctrl-C may interrupt that
        with process.whole():  # an interrupted upload could not be continued
            session, strategy = attached.begin(
                train_samples, checksum, forward_passed=self._forward_passed, earlier=earlier
            )
            session.accumulate = self._length.accumulate
            session.saving.keep(image, by_owner=True)
            if member.restored is not None:
                owner, (version, tree) = member.owner, member.restored
                session.saving.restore(version, tree, member.reply.version)
                strategy.restore(owner["strategy"])
                self._logged = dict(owner["logged"])
                for parameter, gradient in zip(session.replica.parameters, owner["gradients"], strict=False):
                    parameter.grad = (
                        None if gradient is None else gradient.to(parameter.device, parameter.dtype)
                    )
                self._unstepped = owner["unstepped"]
                member.restored = None  # frees memory: the state is as large as the model
            self.assignments = Assignments(
                member, session, strategy, self._length, epoch=self.first_epoch, logged=self._logged
            )
            session.begin()
        return self.assignments

    # ---- the loop over batches

    def batches(self) -> Generator[tuple[m.Assignment, slice]]:
        """Yield the assignments of this epoch, or of the next if this one is over, each with a slice of its
        samples. `optimizer.step()` answers each one."""
        assert self.assignments is not None
        keep_warnings()  # in each epoch, because a script may set up its logging at any time
        self._member.metrics.take_back()
        self._begin_anew()
        self.assignments.turn_over()  # here too, because a script need not use `epochs`
        self._length.begin_loop()
        if self._random is not None:
            restore_random_state(self._random)
            self._random = None
        while (found := self._next(self.assignments)) is not None:
            assignment, step = found
            self._length.give(assignment, step.at)
            self._advance_schedules(self.assignments, assignment, step)
            if not self._unstepped:  # numbers logged after the last step belong to no step
                self._losses.clear()
            at = step.at
            self._unstepped += 1
            self._given = True
            yield assignment, step.batch
            self.assignments.session.replica.check()
            if step.open and step.at == at and not self._member.left:  # the script has not stepped
                self._pass_over(self.assignments, step)

    def _next(self, assignments: Assignments) -> tuple[m.Assignment, TrainingStep] | None:
        """Return the present assignment, and its step with a batch to compute; None if the loop over batches
        ends."""
        session, strategy = assignments.session, assignments.strategy
        while not self._member.left:
            step = self._step if self._step is not None and self._step.open else None
            if step is not None and step.lacking:
                if self._unstepped >= self._length.of_epoch:
                    error = ScriptError(NEVER_STEPPED % (assignments.epoch + 1, self._unstepped))
                    self.leave_after(error)
                    raise error
                assignments.ask(step)
                continue
            if step is None:
                session.saving.write()  # now, because the script's code after its last step is done
            assignment = assignments.present or assignments.wait()
            if assignment.ranges and not self._samples_arrived:
                self._samples_arrived = True
                self._compare_epochs(assignments, assignment)
            if assignment.finished or not assignment.ranges or assignment.epoch != assignments.epoch:
                assignments.begin_evaluation()
                return None
            assignments.report(assignment)
            if step is None:
                if not session.is_new(assignment):  # an answered assignment was sent again
                    assignments.wait()
                    continue
                self._member.metrics.step()
                step = self._step = strategy.begin(assignment, assigned_samples(assignment))
            strategy.times.begin()
            return assignment, step
        return None

    def _advance_schedules(
        self, assignments: Assignments, assignment: m.Assignment, step: TrainingStep
    ) -> None:
        """Advance the script's schedulers to the present batch."""
        before = assignment.local_steps if isinstance(self._member.work, Local) else assignment.version
        self._length.done = step.done
        self._schedules.check(assignment.total_steps, self._member.terms.epochs, assignment.accumulate)
        self._schedules.catch_up(before + step.taken + assignment.earlier_steps, assignment.epoch)
        self._schedules.evaluated(assignments.evaluations)

    def _pass_over(self, assignments: Assignments, step: TrainingStep) -> None:
        """Continue after a batch without `optimizer.step()`: its gradients are added to the next one's.

        Where the server has divided a round for good, a step whose last batch has left no gradients
        contributes nothing instead.
        """
        divided = assignments.strategy.final or step.assignment.slices > 1
        parameters = assignments.session.replica.parameters
        if step.last and divided and all(parameter.grad is None for parameter in parameters):
            step.skip("the script has passed over its batch")
            assignments.settle()
        else:
            step.accumulate()

    def _begin_anew(self) -> None:
        """Discard the gradients of batches that an earlier loop has begun and left without a step.

        A `break` or an exception has ended that loop, such as an interrupt in a notebook's cell. The batches
        since the last optimizer step are handed out again, so their gradients must not count twice.
        """
        step, attached, assignments = self._step, self.attached, self.assignments
        if not self._given or step is None or not step.open or attached is None or assignments is None:
            return
        if step.lacking:  # it was interrupted while it asked
            assignments.ask(step)
        self._given = False
        if not step.open:  # the gradients go into the next step
            return
        attached.optimizer.zero_grad()
        self._losses.clear()
        self._unstepped = 0
        before = step.at
        step.restart()
        if step.withdraw() or step.at < before:
            log.warning(
                "the step at version %d was interrupted, and begins anew with the same batches; its "
                "gradients are discarded",
                step.assignment.version,
            )

    def _compare_epochs(self, assignments: Assignments, first: m.Assignment) -> None:
        """Compare the epoch of the first assignment with the script's, warn of a later one, and move the
        script there.

        Raises:
            ScriptError: the job is in an earlier epoch than the script's `start`.
        """
        if first.epoch < self.start:
            raise ScriptError(
                f"job.epochs(start={self.start}): the job is only in epoch {first.epoch + 1}, with the "
                "parameters of another worker's script; start a new gc-server, and have every worker load "
                "the same file"
            )
        if first.epoch > assignments.epoch and not self._member.reply.version:
            log.warning(
                "the job begins with epoch %d, the choice of its first worker, and not with epoch %d; if a "
                "script continues from a file, all workers must load it",
                *(first.epoch + 1, assignments.epoch + 1),
            )
            assignments.epoch = first.epoch

    # ---- called by the script, its optimizer and its model

    @contextmanager
    def adding(self) -> Generator[None]:
        """Withdraw gradients that were already sent, and send none until the context ends."""
        if self._step is not None:
            self._step.withdraw()
        self._only_adding = True
        try:
            yield
        finally:
            self._only_adding = False

    def log(self, metrics: Mapping[str, float | torch.Tensor]) -> None:
        """Note numbers for the next report; `loss` also as that of the present batch."""
        if self.assignments is not None:
            self.assignments.session.moved()
        for name, value in metrics.items():
            number = float(value.detach() if isinstance(value, torch.Tensor) else value)
            total = self._logged.setdefault(name, [0.0, 0])
            total[0] += number
            total[1] += 1
            if name == "loss":
                self._losses[self._unstepped] = number

    def _loss(self) -> float | None:
        """Return the mean of the losses that were logged since the last `optimizer.step()`; None without
        one."""
        return sum(self._losses.values()) / len(self._losses) if self._losses else None

    def push(self, scale: float, overflow: bool, evaluate: Callable[[], Any] | None) -> None:
        """Push the gradients, as `optimizer.step()`; after an assignment's last batch, wait for the next
        assignment.

        Args:
            scale: factor by which the gradients are too large.
            overflow: True if they are not finite, so that the step is skipped.
            evaluate: function that computes the gradients; None if they were computed before.
        """
        assignments, step = self.assignments, self._step
        if assignments is None:
            raise ScriptError("optimizer.step(): call it in the loop over job.batches(...)")
        if self._member.left:
            raise ScriptError("optimizer.step(): this script has left the job")
        if step is None or not step.open or step.lacking:
            raise ScriptError(NO_WORK)
        session = assignments.session
        self.error_before, self._given = process.last_error(), False
        session.moved()
        session.replica.check()
        with process.whole():
            if overflow:
                step.skip("the GradScaler has found gradients that are not finite")
                usable = False
            else:
                usable = step.push(self._loss, scale, evaluate)
        if not self._losses and not self._told_unlogged:
            self._told_unlogged = True
            log.info(UNLOGGED)
        self._losses.clear()
        self._unstepped = 0
        if step.open:
            self.applied = usable
            return
        assignments.settle()
        self.applied = usable and session.last_counts

    def _forward_passed(self) -> None:
        """Called after the model's forward pass: gradients may be sent from now on, because learning rates
        are set."""
        assignments, step = self.assignments, self._step
        if assignments is None:
            return
        check_alone()
        assignments.session.moved()
        if step is None or not step.open or step.lacking or self._only_adding or not torch.is_grad_enabled():
            return
        assignments.strategy.times.forward()
        step.follow()
