"""Gradients as backward produces them: hooks after accumulation hand each one to a push.

A script may change gradients between `backward()` and `step()`, for instance by clipping or unscaling. A
checksum of each gradient that was handed on finds that at the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ...proto.wire import crc32c
from ..session.pushing import Pushing
from ..session.replica import as_dense
from ..session.timing import StepTimes

COLUMNS = 1024  # values in a row of `sums`


class GradientHooks:
    """Hooks on a model's parameters, for as long as these live. They *follow* a push for one backward pass.

    Autograd calls a hook once for each parameter that the loss reaches, also where several modules share it.
    A gradient that arrives twice, as with reentrant checkpoints, was incomplete when it was handed on: the
    push is unusable.

    Attributes:
        error: exception that a hook met; None if there was none. Raised inside autograd it would lose its
            type.
        repeated: whether a gradient arrived twice.
    """

    def __init__(
        self, parameters: Sequence[torch.Tensor], times: StepTimes, *, checked: bool = False
    ) -> None:
        """
        Args:
            parameters: those of the replica, in its order.
            times: told of each gradient.
            checked: whether `changed` will be called.
        """
        self.error: Exception | None = None
        self.repeated = False
        self._parameters = parameters
        self._times = times
        self._checked = checked
        self._pushing: Pushing | None = None
        self._added: set[int] = set()
        self._checksums: dict[int, int] = {}  # by index, of what was handed on
        self._hooked: set[int] = set()
        self._hook()

    def _hook(self) -> None:
        """Frozen parameters take no hook until they are unfrozen."""
        if len(self._hooked) == len(self._parameters):
            return
        for index, parameter in enumerate(self._parameters):
            if parameter.requires_grad and index not in self._hooked:
                any_parameter: Any = parameter  # its method has no types
                any_parameter.register_post_accumulate_grad_hook(partial(self._hand_on, index))
                self._hooked.add(index)

    def follow(self, pushing: Pushing) -> None:
        """Hand gradients to a push from now on."""
        self._pushing, self.error, self.repeated = pushing, None, False
        self._added.clear()
        self._checksums.clear()
        self._hook()

    def let_go(self) -> list[int]:
        """Hand on nothing more. Returns the tensors whose gradients have not arrived, the last one first."""
        self._pushing = None
        return [index for index in reversed(range(len(self._parameters))) if index not in self._added]

    def changed(self) -> list[int]:
        """Return the tensors whose gradients are no longer what was handed on."""
        return [index for index, before in self._checksums.items() if self._checksum_now(index) != before]

    def _checksum_now(self, index: int) -> int | None:
        gradient = self._parameters[index].grad
        return None if gradient is None else checksum(gradient)

    def _hand_on(self, index: int, parameter: torch.Tensor) -> None:
        if self._pushing is None or self.error is not None:
            return
        if index in self._added:
            self.repeated = True
            return
        if parameter.grad is None:  # another hook has taken it
            return
        self._added.add(index)
        self._times.gradient(index)
        try:
            if self._checked:
                self._checksums[index] = checksum(parameter.grad)
            self._pushing.add(index, as_dense(parameter.grad))
        except Exception as error:
            self.error = error
        self._times.handed()


def checksum(gradient: torch.Tensor) -> int:
    """Return the CRC-32C of a gradient's values in their order.

    A GPU does not send all of them to the host for that: it lays them out in rows, and adds up the bits of
    each row and of each column. Exchanged or negated values change one or the other.
    """
    flat = as_dense(gradient).reshape(-1)
    return crc32c((_bytes(flat if flat.is_cpu else sums(flat).cpu()),))


def sums(flat: torch.Tensor) -> torch.Tensor:
    """Return sums of the bits of float32 values by rows and columns: 8 bytes for each row of 1024."""
    bits = flat.view(torch.int32)
    whole = len(bits) // COLUMNS * COLUMNS
    rows = bits[:whole].view(whole // COLUMNS, COLUMNS)
    return torch.cat([rows.sum(0), rows.sum(1), bits[whole:].to(torch.int64)])


def _bytes(values: torch.Tensor) -> npt.NDArray[np.uint8]:
    return values.numpy().view(np.uint8)
