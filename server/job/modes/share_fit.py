"""The share of samples that a slow worker gets, so that it answers about as often as the others.

Bounded staleness lets nobody get far ahead of the slowest. A worker that needs ten times as long for a batch
would make everybody that slow; with about a tenth of the samples it keeps up, and contributes what it can.
Part of a step's time does not depend on samples, so a tenth of them takes more than a tenth of the time: the
share shrinks until the worker does keep up. The samples that it gives up are few beside those that all others
would lose by waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from ....common.stored import stored

SLOW = 2.0  # times what the others take: a worker with a whole share is given less
BEHIND = 1.1  # the same for a worker that has less already
RECOVERED = 1.5  # times what the others take for as many samples: up to there it is given a whole share again
ENOUGH = 3  # answers before it is judged, by their median
HELPED = 0.75  # of the time for a whole share: if a smaller one does not get below that, it was no use


@stored("share-fit")
@dataclass(kw_only=True, slots=True)
class ShareFit:
    """The share of one worker.

    Attributes:
        share: samples that it gets at a time.
        answers: seconds that its last answers took since the share changed, at most `ENOUGH`.
        whole: seconds for a whole share, until the first smaller one has been judged.
        fixed: a smaller share does not help, because the worker's time does not depend on samples.
    """

    share: int
    answers: list[float] = field(default_factory=list[float])
    whole: float | None = None
    fixed: bool = False

    @property
    def seconds(self) -> float:
        return median(self.answers)

    def note(self, seconds: float) -> None:
        """Record the time that it took for its share."""
        self.answers = [*self.answers, seconds][-ENOUGH:]

    def tells(self, batch_size: int) -> bool:
        """Return whether it is a measure for others: it has a whole share and has answered often enough."""
        return self.share == batch_size and len(self.answers) == ENOUGH

    def adapt(self, others: Sequence[float], batch_size: int) -> None:
        """Change the share, between 1 and `batch_size`, if what has been noted calls for it.

        Args:
            others: seconds that others take for whole shares, in order.
        """
        if len(self.answers) < ENOUGH or self.fixed or not others:
            return
        usual = (others[(len(others) - 1) // 2] + others[len(others) // 2]) / 2
        share = self._fitting(usual, batch_size)
        if share != self.share:
            self.whole = self.seconds if self.share == batch_size else None
            self.share, self.answers = share, []

    def _fitting(self, usual: float, batch_size: int) -> int:
        """Return the share that is due. usual: seconds that others take for whole shares."""
        whole, self.whole = self.whole, None
        if whole is not None and self.seconds > HELPED * whole:
            self.fixed = True
            return batch_size
        if self.share == batch_size and self.seconds <= SLOW * usual:
            return batch_size
        if self.seconds * batch_size <= RECOVERED * usual * self.share:
            return batch_size
        if self.seconds > BEHIND * usual:
            return max(1, int(self.share * usual / self.seconds))
        return max(self.share, int(self.share * min(2.0, usual / self.seconds)))
