"""Hooks that hand each gradient to a push, or to a local step, as soon as backward has accumulated it.

A script may change gradients between `backward()` and `step()`, for instance by clipping or unscaling.
Checksums detect that: one is taken of each gradient when a hook hands it to the push, and compared at the
step.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from ...proto.wire import crc32c
from ..session.replica import as_dense
from ..session.timing import StepTimes

COLUMNS = 1024  # values in a row, in `sums`


class Receiver(Protocol):
    """Receives the gradients of one backward pass, such as a push."""

    def add(self, index: int, gradient: torch.Tensor) -> None:
        """Take the gradient, dense float32, of the parameter with this index."""
        ...


class GradientHooks:
    """Hooks on a model's parameters, which hand gradients to one receiver at a time (`follow`, then `stop`).

    Hooks stay registered for as long as the parameters live. Autograd calls a hook once for each parameter
    that the loss reaches, also where several modules share it. A gradient that arrives twice, as with
    reentrant checkpoints, was incomplete the first time: the push is unusable.

    Attributes:
        error: exception raised by a hook during the present pass; None if there was none. It is kept here
            because autograd would raise it as another type.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        times: StepTimes,
        *,
        checked: bool = False,
        frees: bool = False,
    ) -> None:
        """
        Args:
            checked: True to take checksums, so that `changed` can be called.
            frees: True to free each gradient that was handed on: all together are as large as the model."""
        self.error: Exception | None = None
        self.repeated = False
        self._parameters = parameters
        self._times = times
        self._checked = checked
        self.frees = frees
        self._receiver: Receiver | None = None
        self._added: set[int] = set()
        self._checksums: dict[int, int] = {}  # by parameter, of the gradient when it was handed on
        self._hooked: set[int] = set()
        self._hook()

    def _hook(self) -> None:
        """Register hooks on parameters that have none yet. torch allows none on frozen parameters."""
        if len(self._hooked) == len(self._parameters):
            return
        for index, parameter in enumerate(self._parameters):
            if parameter.requires_grad and index not in self._hooked:
                any_parameter: Any = parameter  # its method has no types
                any_parameter.register_post_accumulate_grad_hook(partial(self._hand_on, index))
                self._hooked.add(index)

    def follow(self, receiver: Receiver) -> None:
        """Hand gradients to `receiver` from now on, until `stop`."""
        self._receiver, self.error, self.repeated = receiver, None, False
        self._added.clear()
        self._checksums.clear()
        self._hook()

    def stop(self) -> list[int]:
        """Stop handing on gradients. Returns the indices of the parameters whose gradients have not
        arrived, in descending order."""
        self._receiver = None
        return [index for index in reversed(range(len(self._parameters))) if index not in self._added]

    def changed(self) -> list[int]:
        """Return the indices of the parameters whose gradients have changed since a hook handed them over."""
        return [index for index, before in self._checksums.items() if self._checksum_now(index) != before]

    def _checksum_now(self, index: int) -> int | None:
        gradient = self._parameters[index].grad
        return None if gradient is None else checksum(gradient)

    def _hand_on(self, index: int, parameter: torch.Tensor) -> None:
        """Called by autograd when a parameter's gradient is accumulated: hand the gradient on."""
        if self._receiver is None or self.error is not None:
            return
        if index in self._added:
            self.repeated = True
            return
        if parameter.grad is None:  # another hook has removed it
            return
        self._added.add(index)
        self._times.gradient(index)
        try:
            if self._checked:
                self._checksums[index] = checksum(parameter.grad)
            self._receiver.add(index, as_dense(parameter.grad))
            if self.frees:
                parameter.grad = None
        except Exception as error:
            self.error = error
        self._times.handed()


def checksum(gradient: torch.Tensor) -> int:
    """Return a CRC-32C that changes when values of the gradient, or their order, change.

    For a gradient on the host it is computed over all values. A GPU sends only sums to the host: it lays the
    values out in rows, and adds up the bits of each row and of each column. Exchanged or negated values
    change one or the other.
    """
    flat = as_dense(gradient).reshape(-1)
    return crc32c((_bytes(flat if flat.is_cpu else sums(flat).cpu()),))


def sums(flat: torch.Tensor) -> torch.Tensor:
    """Return sums of the bits of float32 values, by columns and rows of a table 1024 values wide.

    They are int64, shape (1024 + rows + rest,): a sum for each column and each full row, then the bits of the
    values behind the last full row. flat: float32, shape (elements,).
    """
    bits = flat.view(torch.int32)
    whole = len(bits) // COLUMNS * COLUMNS
    rows = bits[:whole].view(whole // COLUMNS, COLUMNS)
    return torch.cat([rows.sum(0), rows.sum(1), bits[whole:].to(torch.int64)])


def _bytes(values: torch.Tensor) -> npt.NDArray[np.uint8]:
    return values.numpy().view(np.uint8)
