"""The number of samples that a slow worker gets, such that it answers about as often as the others.

Bounded staleness keeps all workers close to the slowest. A worker that needs ten times as long for a batch
would make all workers that slow. With about a tenth of the samples it keeps up, and contributes a smaller
gradient. Part of a step's time does not depend on samples, so a tenth of them takes more than a tenth of the
time. Therefore the share shrinks until the worker does keep up. The samples that it gives up are few beside
those that all workers would lose by waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from ....common.stored import stored

SLOW = 2.0  # A worker with a whole share gets less if it takes more than this multiple of the usual time.
BEHIND = 1.1  # A worker with a smaller share gets less if it takes more than this multiple of the usual time.
RECOVERED = 1.5  # Up to this multiple of the usual time per sample, a worker gets a whole share again.
ENOUGH = 3  # Number of answers whose median counts as the worker's time.
HELPED = 0.75  # A smaller share helps if it takes at most this fraction of the time for a whole share.


@stored("share-fit")
@dataclass(kw_only=True, slots=True)
class ShareFit:
    """The share of samples of one worker, fitted to its speed."""

    share: int  # number of samples that it gets at a time
    answers: list[float] = field(default_factory=list[float])  # seconds, since the share changed
    whole: float | None = None  # seconds for a whole share, until the first smaller one is judged
    fixed: bool = False  # a smaller share does not help: the worker's time does not depend on samples

    @property
    def seconds(self) -> float:
        """Median of the seconds that the worker took for its share."""
        return median(self.answers)

    def note(self, seconds: float) -> None:
        """Record the seconds that the worker took for its last share."""
        self.answers = [*self.answers, seconds][-ENOUGH:]

    def is_reference(self, batch_size: int) -> bool:
        """Return True if the worker's time is a reference for others: it has a whole share and enough
        answers."""
        return self.share == batch_size and len(self.answers) == ENOUGH

    def adapt(self, others: Sequence[float], batch_size: int) -> None:
        """Change the share, between 1 and `batch_size`, if the recorded times call for it.

        Args:
            others: seconds that other workers take for whole shares, ascending.
        """
        if len(self.answers) < ENOUGH or self.fixed or not others:
            return
        usual = (others[(len(others) - 1) // 2] + others[len(others) // 2]) / 2
        share = self._fitting(usual, batch_size)
        if share != self.share:
            self.whole = self.seconds if self.share == batch_size else None
            self.share, self.answers = share, []

    def _fitting(self, usual: float, batch_size: int) -> int:
        """Return the number of samples that the worker should get."""
        whole, self.whole = self.whole, None
        # 1. The first smaller share did not help: restore the whole share for good.
        if whole is not None and self.seconds > HELPED * whole:
            self.fixed = True
            return batch_size
        # 2. The worker is fast enough with a whole share, or has become so.
        if self.share == batch_size and self.seconds <= SLOW * usual:
            return batch_size
        if self.seconds * batch_size <= RECOVERED * usual * self.share:
            return batch_size
        # 3. It is still behind: shrink the share.
        if self.seconds > BEHIND * usual:
            return max(1, int(self.share * usual / self.seconds))
        # 4. It keeps up: let the share grow, at most to the double.
        return max(self.share, int(self.share * min(2.0, usual / self.seconds)))
