"""How many samples a slow worker gets at a time, so that it answers about as often as the others.

Bounded staleness lets nobody get far ahead of the slowest. A worker that needs ten times as long for a batch
would make everybody that slow; with a tenth of the samples it keeps up, and contributes what it can.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SLOW = 2.0  # times what the others take: from there on a share shrinks
BEHIND = 1.1  # the same for a share that has shrunk already
ENOUGH = 3  # answers in a row before it is judged
HELPED = 0.75  # of the time before: a smaller share that does not get below that was no use
SMOOTHING = 0.3  # weight of the last answer in the mean


@dataclass(kw_only=True, slots=True)
class Pace:
    """Of one worker. share: samples that it gets. seconds: for its answers, smoothed; answers: how many since
    the share changed. before: seconds with the share before, if it was larger. fixed: a smaller share is of
    no use, because its time does not go into samples."""

    share: int
    seconds: float = 0.0
    answers: int = 0
    before: float | None = None
    fixed: bool = False

    def note(self, seconds: float) -> None:
        """It took this long for a whole share."""
        self.answers += 1
        self.seconds += (seconds - self.seconds) * (1.0 if self.answers == 1 else SMOOTHING)

    def tells(self, batch_size: int) -> bool:
        """Whether others are to be compared with it: it has a whole share, and has answered often enough."""
        return self.share == batch_size and self.answers >= ENOUGH

    def adapt(self, whole: Sequence[float], batch_size: int) -> None:
        """Change the share, between 1 and `batch_size`, if what has been noted calls for it.

        Args:
            whole: seconds that others take for whole shares, in order.
        """
        if self.answers < ENOUGH or self.fixed or not whole or self.seconds <= 0:
            return
        usual = (whole[(len(whole) - 1) // 2] + whole[len(whole) // 2]) / 2
        share = self.share
        if self.before is not None and self.seconds > HELPED * self.before:
            share, self.fixed = batch_size, True
        elif self.seconds > SLOW * usual:
            share = max(1, round(self.share * usual / self.seconds))
        elif self.share < batch_size and (self.seconds < usual or self.seconds > BEHIND * usual):
            # To what would take about as long as the others take: with the bound, all go at its pace.
            fitting = int(self.share * min(2.0, usual / self.seconds) + 1e-9)
            share = max(1, min(batch_size, fitting))
        if share != self.share:
            self.before = self.seconds if self.seconds > SLOW * usual else None
            self.share, self.answers = share, 0
