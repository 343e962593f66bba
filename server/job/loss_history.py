"""The training loss over the whole job, in a bounded number of points."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ...common.stored import stored
from ...proto.messages import LossPoint

POINTS = 512


@stored("loss-history")
@dataclass(slots=True)
class LossHistory:
    """Means over so many steps each that there are fewer than `POINTS`.

    points: version, samples and sum of losses. each: steps of a point. steps, samples, total: of the last
    point, which is not complete.
    """

    points: list[tuple[int, int, float]] = field(default_factory=list[tuple[int, int, float]])
    each: int = 1
    steps: int = 0
    samples: int = 0
    total: float = 0.0

    def add(self, version: int, samples: int, loss: float) -> None:
        """Add the mean loss over the samples of the step that made a version."""
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
