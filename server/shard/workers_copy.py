"""The server's copy of the parameters as every worker has them.

It shares the memory of the parameters until updates are lossy. From then on the updates of a version change
it only once the version is complete. A version that fails therefore needs no other copy to return to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from ...compressors import Payload, put_update

Take = Callable[[Payload, torch.Tensor], None]  # changes elements by a payload


class WorkersCopy:
    """The copy of the last complete version, in flat order, and the changes to the next one.

    Attributes:
        last: the copy without the changes that are due.
    """

    def __init__(self, parameters: torch.Tensor, changes: Callable[[], None]) -> None:
        """changes: called before the values change."""
        self._parameters, self._changes = parameters, changes
        self.last = parameters
        self._due: list[tuple[Take, Payload, int]] = []
        self._complete = False

    @property
    def values(self) -> torch.Tensor:
        """The copy, after the changes of a version that is complete."""
        if self._complete:
            self._changes()
            for take, payload, at in self._due if self.separate else ():
                take(payload, self.last[at : at + payload.elements])
            self.drop()
        return self.last

    @property
    def separate(self) -> bool:
        """Whether the copy has memory of its own."""
        return self.last is not self._parameters

    def split(self) -> None:
        """Take memory of its own for the copy, unless it has some."""
        if not self.separate:
            self.last = self._parameters.detach().clone()

    def restore(self, values: torch.Tensor | None) -> None:
        """Take other values, which belong to this object afterwards; None for the parameters."""
        self.drop()
        self.last = self._parameters if values is None else values

    def change_later(self, values: Payload, at: int) -> None:
        """Note that the elements from `at` on become the parameters: `values`, which share their memory and
        may not have taken their step yet. The copy may take memory of its own before they do."""
        self._due.append((put_update, values, at))

    def change(self, take: Take, payload: Payload, at: int, scratch: torch.Tensor) -> None:
        """Note a change of the elements from `at` on. scratch: memory that the payload must not share."""
        if not self.separate:
            return
        if np.may_share_memory(payload.data, scratch.numpy()):
            payload = replace(payload, data=payload.data.copy())
        self._due.append((take, payload, at))

    def complete(self) -> None:
        """Declare that the version has all of its changes. They take effect when the copy is read next."""
        self._complete = True

    def drop(self) -> None:
        """Drop the changes that have not taken effect."""
        self._due.clear()
        self._complete = False
