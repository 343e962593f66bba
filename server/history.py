"""The pace of a job over its versions, in a bounded number of points."""

from __future__ import annotations

from dataclasses import dataclass, field

POINTS = 256  # at this number of points, each second one is dropped


@dataclass(slots=True)
class History:
    """Time and bytes at each version that is a multiple of `each`.

    Attributes:
        points: oldest first: version, seconds of a clock, bytes received and sent until then.
    """

    points: list[tuple[int, float, int, int]] = field(default_factory=list[tuple[int, float, int, int]])
    each: int = 1  # doubled whenever there are `POINTS` points

    def add(self, version: int, seconds: float, received: int, sent: int) -> None:
        """Add a version, which is larger than the last one."""
        if version % self.each:
            return
        self.points.append((version, seconds, received, sent))
        if len(self.points) == POINTS:
            self.each *= 2
            self.points = [point for point in self.points if point[0] % self.each == 0]
