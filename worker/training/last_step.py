"""The last local step of an overlapped round, taken tensor by tensor during its backward pass (`local`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from ..session.pushes import Push
from .step import all_finite


class TensorOptimizer(Protocol):
    """The optimizer of local steps, where it can step each parameter by itself."""

    def step_copy(self, index: int, parameter: torch.Tensor, gradient: torch.Tensor) -> Callable[[], None]:
        """Take one step on a copy of one parameter, in place.

        Args:
            index: index of the parameter in the replica.
            parameter: the copy.
            gradient: its gradient, dense float32.

        Returns:
            A function that takes the optimizer's state of the parameter back.
        """
        ...


class NonFiniteStep(Exception):
    """The loss or a gradient of the last local step is not finite; the text says which."""


class LastStep:
    """The last local step of a round, taken tensor by tensor while backward produces gradients.

    It receives gradients from `GradientHooks`, and passes changes to a push.

    Attributes:
        push: push that receives the changes.
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
        """
        Args:
            push: push that receives the changes.
            optimizer: takes the steps.
            parameters: parameters after the earlier steps of the round.
            start: parameters at the round's start.
            pull: share of its distance from `start` by which the step is pulled back.
        """
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
            index: number of the tensor.
            reached: whether an earlier step had a gradient of it.
            pulled: whether the correction of this step applies, although the step has no gradient of it.
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
