"""Elastic averaging (`local:elastic=α`).

Source: Zhang, Choromanska and LeCun, "Deep learning with Elastic Averaging SGD", NIPS 2015. A worker keeps
its own parameters x_i from round to round, and the replica holds the center x̃. After the steps of a round,

    x_i <- x_i - α (x_i - x̃)        x̃ <- x̃ + Σ_i α (x_i - x̃)

with the x̃ that the round began with on both sides. A worker begins its first round at the center. It pushes
α (x̃ - x_i), which the server subtracts with the weight 1. A push that arrives too late goes into the residual
like any other, and moves the center later. If the change of a round is not finite, the worker begins again at
the center.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...proto import messages as m
from .variant import Changes, Variant


class Elastic(Variant):
    """Elastic averaging with the share α, above 0 and at most 1.

    Attributes:
        own: this worker's parameters between rounds; None to begin at the center.
    """

    def __init__(self, alpha: float) -> None:
        self._alpha = alpha
        self.own: list[torch.Tensor] | None = None

    def start(self, assignment: m.Assignment, parameters: Sequence[torch.Tensor]) -> bool:
        for parameter, own in zip(parameters, self.own or (), strict=False):
            parameter.copy_(own)
        return False

    def change(self, start: Sequence[torch.Tensor], end: Sequence[torch.Tensor]) -> Changes:
        changes = [(center - own).mul_(self._alpha) for center, own in zip(start, end, strict=True)]
        self.own = [own + change for own, change in zip(end, changes, strict=True)]
        return changes

    def drop(self) -> None:
        self.own = None

    def image(self) -> dict[str, Any]:
        return {} if self.own is None else {"own": [each.clone() for each in self.own]}

    def restore(self, image: Mapping[str, Any]) -> None:
        self.own = image.get("own")
