"""The training loss over the whole job, in a bounded number of points."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from ...common.stored import stored
from ...proto.messages import LossPoint

POINTS = 512  # at this number of points, neighbours are merged in pairs


def mean_loss(losses: Sequence[tuple[float | None, int]]) -> float:
    """Return the mean of losses, weighted by samples; NaN if none is known.

    Args:
        losses: mean loss and number of samples of each push; None for a loss that is not known.
    """
    known = [(loss, samples) for loss, samples in losses if loss is not None and samples]
    total = sum(samples for _, samples in known)
    return sum(loss * samples for loss, samples in known) / total if total else math.nan


@stored("loss-history")
@dataclass(slots=True)
class LossHistory:
    """Mean training losses over the whole job. Each point covers the same number of steps.

    Attributes:
        points: complete points, oldest first: last version, number of samples, sum of the samples' losses.
    """

    points: list[tuple[int, int, float]] = field(default_factory=list[tuple[int, int, float]])
    each: int = 1  # number of steps in a point; doubled whenever there are `POINTS` points
    steps: int = 0  # number of steps in the incomplete last point
    samples: int = 0  # number of samples in the incomplete last point
    total: float = 0.0  # sum of the samples' losses in the incomplete last point

    def add(self, version: int, samples: int, loss: float) -> None:
        """Add the step that produced `version`. A step without samples or with a loss that is not finite is
        ignored.
        """
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
        """Return the complete points as messages, with the mean loss of each."""
        return tuple(LossPoint(version=version, loss=total / count) for version, count, total in self.points)
