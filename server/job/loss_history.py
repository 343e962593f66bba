"""How the training loss went, in a bounded number of points however long the job is."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ...common.stored import stored
from ...proto.messages import LossPoint

POINTS = 512


@stored("loss-history")
@dataclass(slots=True)
class LossHistory:
    """Means over as many steps as it takes for all points to be no more than `POINTS`.

    each: samples that a whole point is of, in steps. steps, samples, total: of the one that is not whole.
    """

    points: list[tuple[int, int, float]] = field(default_factory=list[tuple[int, int, float]])
    each: int = 1
    steps: int = 0
    samples: int = 0
    total: float = 0.0

    def add(self, version: int, samples: int, loss: float) -> None:
        """A step has led to a version; its mean loss was over so many samples."""
        if not samples or not math.isfinite(loss):
            return
        self.steps += 1
        self.samples += samples
        self.total += samples * loss
        if self.steps < self.each:
            return
        self.points.append((version, self.samples, self.total))
        self.steps, self.samples, self.total = 0, 0, 0.0
        if len(self.points) == POINTS:
            pairs = zip(self.points[::2], self.points[1::2], strict=True)
            self.points = [(last[0], first[1] + last[1], first[2] + last[2]) for first, last in pairs]
            self.each *= 2

    def messages(self) -> tuple[LossPoint, ...]:
        return tuple(LossPoint(version=version, loss=total / count) for version, count, total in self.points)
