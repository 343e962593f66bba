"""Rounds of local steps whose changes leave during the backward pass of the last step (`--overlap backward`
and `both`; figures 1 and 3b of the multi-step paper).

Once a parameter's gradient is there, a copy of the parameter takes the last step, and the change goes into
the push (`LastStep`). The parameters themselves keep their values until backward has ended, because it may
still use them. The bits are those of steps without overlap. With `both`, parts of the update come back early,
and the first forward pass of the next round waits for them layer by layer (`worker/tasks/ahead`).

If the last step is not finite or a gradient arrives twice, the optimizer's state of that step is undone, the
push is abandoned, and the round ends as it would without overlap. With `both`, parts that have left cannot be
taken back. Then the last step is left out for the tensors whose change has not left: their change of the
earlier steps does. A push with `both` always counts all samples of its assignment, because the server weights
each part before the push is committed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from ...compressors import NonFiniteGradient
from ...proto import messages as m
from ..metrics import WorkerMetrics
from ..session.pushes import Push
from ..session.session import Session
from .hooks import GradientHooks
from .local import UNUSABLE_CHANGE, LocalOptimizer, LocalStep, LocalStrategy
from .sharding import bounds
from .step import Loss, all_finite, finite, loss_of

log = logging.getLogger("gradwire.worker")


class TensorOptimizer(LocalOptimizer, Protocol):
    """The optimizer of local steps, where it can step each parameter by itself."""

    def step_copy(self, index: int, parameter: torch.Tensor, gradient: torch.Tensor) -> Callable[[], None]:
        """Take one step on a copy of one parameter, in place.

        Args:
            index: index of the parameter.
            parameter: the copy.
            gradient: gradient of the parameter, dense float32.

        Returns:
            A function that undoes the step in the optimizer's state of this parameter.
        """
        ...


class NonFiniteStep(Exception):
    """The loss or a gradient of the last local step is not finite; the text says which."""


class LastStep:
    """The last local step of a round, taken tensor by tensor while backward produces gradients.

    It receives gradients from `GradientHooks`, and passes changes to a push.

    Attributes:
        changes: changes that were passed on, by index of the tensor; None for a tensor without one.
    """

    def __init__(
        self,
        push: Push,
        optimizer: TensorOptimizer,
        parameters: Sequence[torch.Tensor],
        start: Sequence[torch.Tensor],
        pull: float,
    ) -> None:
        """pull: share of its distance from `start` by which the step is pulled back."""
        self.push = push
        self.changes: dict[int, torch.Tensor | None] = {}
        self._optimizer = optimizer
        self._parameters = parameters
        self._start = start
        self._pull = pull
        self._undo: list[Callable[[], None]] = []

    def add(self, index: int, gradient: torch.Tensor) -> None:
        """Take the step of one tensor on a copy, and pass on its change.

        Raises:
            NonFiniteStep: the gradient is not finite; no state was changed.
            NonFiniteGradient: the change is not finite.
        """
        if not all_finite((gradient,)):
            raise NonFiniteStep("a gradient is not finite")
        parameter, began = self._parameters[index].detach(), self._start[index]
        with torch.no_grad():
            stepped = parameter.clone()
            pull = (parameter - began).mul_(self._pull) if self._pull else None
            self._undo.append(self._optimizer.step_copy(index, stepped, gradient))
            if pull is not None:
                stepped.sub_(pull)
            self.pass_on(index, torch.sub(began, stepped, out=stepped))

    def leave_out(self, index: int, *, reached: bool, pulled: bool = False) -> None:
        """Pass on the change of a tensor's earlier steps.

        Args:
            reached: True if an earlier step had a gradient of it.
            pulled: True if the correction of this step applies, although the step has no gradient of it.
        """
        if not reached:
            return self.pass_on(index, None)
        began = self._start[index]
        with torch.no_grad():
            ended = self._parameters[index].detach().clone()
            if pulled and self._pull:
                ended.sub_((ended - began).mul_(self._pull))
            self.pass_on(index, torch.sub(began, ended, out=ended))
        return None

    def pass_on(self, index: int, change: torch.Tensor | None) -> None:
        """Add a tensor's change to the push."""
        self.push.add(index, change)
        self.changes[index] = change

    def undo(self) -> None:
        """Restore the optimizer's state from before this step."""
        for undo in self._undo:
            undo()


class OverlappedStrategy(LocalStrategy):
    """The strategy of work `local` whose changes leave during the backward pass of each round's last step."""

    def __init__(
        self, session: Session, metrics: WorkerMetrics, optimizer: TensorOptimizer, **options: Any
    ) -> None:
        """optimizer: takes the local steps, the last one of a round tensor by tensor. options: the other
        arguments of `LocalStrategy`."""
        super().__init__(session, metrics, optimizer, **options)
        self.by_tensor = optimizer
        self.hooks = GradientHooks(session.replica.parameters, self.times)

    def begin(self, assignment: m.Assignment, samples: int) -> LocalStep:
        if self.hooks is None:
            return super().begin(assignment, samples)
        return OverlappedStep(self, self.hooks, assignment, bounds(assignment) or self.batches(samples))


class OverlappedStep(LocalStep):
    """One round of local steps whose changes leave during its last backward pass."""

    def __init__(
        self,
        strategy: OverlappedStrategy,
        hooks: GradientHooks,
        assignment: m.Assignment,
        batches: list[slice],
    ) -> None:
        super().__init__(strategy, assignment, batches)
        self._overlapped, self._hooks = strategy, hooks
        self._last: LastStep | None = None  # the last step, while its changes leave during backward

    def follow(self) -> None:
        """Called between a batch's forward and backward pass. Before the last backward pass of the round,
        begin the push to which the hooks hand the changes."""
        super().follow()
        strategy = self._overlapped
        if strategy.hooks is None or self.at < len(self._batches) - 1:
            return
        self._last = LastStep(
            strategy.begin_push(self.assignment, self._counted(with_batch=True), strategy.rates),
            strategy.by_tensor,
            strategy.session.replica.parameters,
            self._start,
            strategy.work.correction if self.samples else 0.0,
        )
        self._hooks.follow(self._last)

    @property
    def sent(self) -> bool:
        return self._last is not None and bool(self._last.push.checksums)

    def withdraw(self) -> bool:
        last, self._last = self._last, None
        if last is None:
            return False
        self._hooks.stop()
        last.undo()
        self._strategy.session.abandon(last.push)
        return bool(last.changes)

    def push(self, loss: Loss, scale: float = 1.0, evaluate: Callable[[], Any] | None = None) -> bool:
        if self._last is not None:
            answered = self._finish_last(self._last, loss_of(loss))
            if answered is not None:
                return answered
        return super().push(loss, scale, evaluate)

    def _finish_last(self, last: LastStep, loss: float | None) -> bool | None:
        """Complete the push that hooks have filled during the last backward pass, and answer. Returns True if
        the push contributes to the job. None if it was withdrawn: the last step is then taken as without
        hooks.

        Raises:
            The strategy's `give_up`: a gradient arrived twice, and parts that have left cannot be taken back;
            or too many steps in a row have contributed nothing.
        """
        strategy, hooks = self._strategy, self._hooks
        hooks.stop()
        if hooks.repeated:
            why = "a gradient arrived twice in one step"
            if strategy.final and self.sent:
                raise strategy.give_up(f"{why}, and some parts have left: use --overlap off for this model")
            self.withdraw()
            strategy.stop_overlap(why)
            return None
        try:
            if hooks.error is not None:
                raise hooks.error
            if not finite(loss):
                raise NonFiniteStep(f"the loss is {loss}")
            for index in self._rest(last):
                gradient = strategy.session.replica.gradient(index)
                if gradient is None:
                    last.leave_out(index, reached=index in self._reached, pulled=True)
                else:
                    last.add(index, gradient)
        except (NonFiniteStep, NonFiniteGradient) as error:
            if not (strategy.final and self.sent):
                self.withdraw()
                return None
            if finite(loss) and not self.samples:
                self._loss = loss
            return self._answer_in_part(last, error)
        if not self.samples:
            self._loss = loss
        self._end_last(last)
        return self._commit(last.push)

    def _answer_in_part(self, last: LastStep, error: Exception) -> bool:
        """Commit the push although the last step has failed for some tensors, because the server may have
        stepped parts of the push already. Returns True if the push contributes to the job.

        If the loss or a gradient was not finite, tensors that have not left push the change of their earlier
        steps. If there were none, or a change is not finite, the rest of the push contributes nothing.
        """
        why = str(error) if isinstance(error, NonFiniteStep) else UNUSABLE_CHANGE
        if isinstance(error, NonFiniteStep) and self.samples:
            version = self.assignment.version
            log.warning("version %d: %s; tensors that have not left leave out this local step", version, why)
            try:
                for index in self._rest(last):
                    last.leave_out(index, reached=index in self._reached)
                self._end_last(last)
                return self._commit(last.push)
            except NonFiniteGradient:
                why = UNUSABLE_CHANGE
        self._end_last(last)
        self.changes = None
        return self._contribute_nothing(why, last.push, self._loss)

    def _rest(self, last: LastStep) -> list[int]:
        """Return the indices of the tensors whose changes were not passed on, in descending order."""
        return [index for index in reversed(range(len(self._start))) if index not in last.changes]

    def _end_last(self, last: LastStep) -> None:
        """End the round after its last step, which was taken tensor by tensor."""
        changes = [last.changes.get(index) for index in range(len(self._start))]
        self._last, self.open = None, False
        self._count()
        self.samples = last.push.samples
        self._put_back(changes)
