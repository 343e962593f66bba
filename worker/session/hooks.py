"""Gradients as backward produces them: hooks after accumulation hand each to the push that is being made."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from .pushing import Pushing
from .timing import StepTimes

log = logging.getLogger("gradwire.worker")


class GradientHooks:
    """Of a model's parameters, for as long as they live. A push is *followed* during one backward pass.

    Autograd calls a hook once for each parameter that the loss reaches, also where several modules share it.
    A gradient that comes twice, as of reentrant checkpoints, was handed on too early: then the push is no
    good.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        times: StepTimes,
        checksum: Callable[[torch.Tensor], int] | None = None,
    ) -> None:
        """
        Args:
            times: of the steps that are pushed.
            checksum: of a gradient, for `changed`.
        """
        self._parameters = parameters
        self._times = times
        self._pushing: Pushing | None = None
        self._added: set[int] = set()
        self._checksum = checksum
        self._checksums: dict[int, int] = {}  # by place, of what was handed on
        self.error: Exception | None = None  # what a hook met; raised in autograd it would lose its type
        self.repeated = False  # whether a gradient came twice
        self._hooked: set[int] = set()
        self._hook()

    def _hook(self) -> None:
        """Frozen parameters take no hook until they are unfrozen."""
        for place, parameter in enumerate(self._parameters):
            if parameter.requires_grad and place not in self._hooked:
                any_parameter: Any = parameter  # its method has no types
                any_parameter.register_post_accumulate_grad_hook(partial(self._came, place))
                self._hooked.add(place)

    def follow(self, pushing: Pushing) -> None:
        """Hand what comes from now on to a push."""
        self._pushing, self.error, self.repeated = pushing, None, False
        self._added.clear()
        self._checksums.clear()
        self._hook()

    def let_go(self) -> list[int]:
        """The pass is over, or has failed. Returns the tensors whose gradients have not come."""
        self._pushing = None
        return [place for place in reversed(range(len(self._parameters))) if place not in self._added]

    def changed(self) -> list[int]:
        """The tensors whose gradients are not what was handed on any more."""
        return [place for place, was in self._checksums.items() if self._now(place) != was]

    def _now(self, place: int) -> int | None:
        gradient = self._parameters[place].grad
        return None if gradient is None or self._checksum is None else self._checksum(gradient)

    def _came(self, place: int, parameter: torch.Tensor) -> None:
        if self._pushing is None or self.error is not None:
            return
        if place in self._added:
            self.repeated = True
            return
        if parameter.grad is None:  # another hook has taken it
            return
        self._added.add(place)
        self._times.gradient(place)
        try:
            if self._checksum is not None:
                self._checksums[place] = self._checksum(parameter.grad)
            self._pushing.add(place, as_dense(parameter.grad))
        except Exception as error:
            self.error = error
        self._times.handed()


def as_dense(gradient: torch.Tensor) -> torch.Tensor:
    """As it is pushed."""
    return gradient.detach().to_dense().to(torch.float32)
