"""The contract of the variants of local steps (`local`): start of a round, its change, and the changes that
are carried on. Variants may be combined; the server refuses those that exclude each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...proto import messages as m

Changes = Sequence[torch.Tensor | None]


class Variant:
    """A variant of local steps. The methods here are those of plain local steps."""

    def start(self, assignment: m.Assignment, parameters: Sequence[torch.Tensor]) -> bool:
        """Move the parameters, which are the global model, to where the round begins. Returns True if the
        round's change is measured from there; False if it is measured from the global model."""
        return False

    def change(self, start: Sequence[torch.Tensor], end: Sequence[torch.Tensor]) -> Changes | None:
        """Return the change of a round with at least one step; None for `start` - `end`. start: parameters
        from which the change is measured."""
        return None

    def carry(self, changes: Changes, version: int, *, everything: bool) -> Changes:
        """Return the changes that the round pushes, and keep the others for later rounds. Raises
        NonFiniteGradient if a change that would be kept contains an infinity or a NaN.

        Args:
            changes: changes of the round, by tensor. They are not altered.
            everything: True if nothing may be kept, because the worker leaves.
        """
        return changes

    def drop(self) -> None:
        """Called when the change of a round is not finite, and its push is abandoned."""

    def image(self) -> dict[str, Any]:
        """Return the state that `restore` continues from, as plain values and copies of tensors."""
        return {}

    def restore(self, image: Mapping[str, Any]) -> None:
        """Replace the state by one that `image` returned."""


def subtract(parameters: Sequence[torch.Tensor], less: Changes) -> bool:
    """Subtract values from parameters, in place; return True if there are any. less: empty for none."""
    for parameter, each in zip(parameters, less, strict=False):
        if each is not None:
            parameter.sub_(each.to(parameter.device))
    return bool(less)
