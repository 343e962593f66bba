"""The samples of a job: which of them are still to be trained on, by epoch.

Each epoch is a permutation of the training samples, which every worker can compute. Samples here are
positions in that permutation. They are drawn in order. A sample is

    fresh     | not drawn yet                         | -> unsettled (`draw`)
    unsettled | assigned to a member                  | -> settled (`settle`), returned (`give_back`)
    returned  | its member is lost; drawn again       | -> unsettled (`draw`, or `take_back` by its member),
              | before fresh ones                     |    settled (`take_back`)
    settled   | trained on, or in a worker's residual | -> returned (`give_back` if settled too early)

An epoch is complete once all of its samples are settled.

Invariants:

- A sample is in one of these states only.
- While an epoch has samples left to draw, no sample of a later epoch is drawn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from ...common.stored import stored
from ...proto.messages import Range
from ...proto.shares import draws, share


@stored("drawn-samples")
@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """Samples that were drawn together to be assigned."""

    epoch: int  # epoch of the samples, from 0
    ranges: tuple[Range, ...]  # ranges of positions in the epoch's permutation

    @property
    def count(self) -> int:
        """Number of samples in all ranges."""
        return sum(each.count for each in self.ranges)

    def divided(self, world: int, least: int = 1) -> list[Drawn]:
        """Divide the samples among `world` workers as evenly as whole samples allow, and return one piece for
        each.

        Args:
            least: smallest number of samples of a piece. There are fewer pieces than workers if these would
                be smaller.
        """
        world = max(1, min(world, self.count // least))
        shares = [share(self.count, position, world) for position in range(world)]
        return [Drawn(epoch=self.epoch, ranges=self._between(*each)) for each in shares]

    def with_more(self, more: Drawn) -> Drawn:
        """Return these samples followed by more of the same epoch."""
        ranges = list(self.ranges)
        for each in more.ranges:
            last = ranges[-1] if ranges else None
            if last is not None and last.start + last.count == each.start:
                ranges[-1] = Range(start=last.start, count=last.count + each.count)
            else:
                ranges.append(each)
        return Drawn(epoch=self.epoch, ranges=tuple(ranges))

    def part(self, start: int, end: int) -> Drawn:
        """Return the samples with the indices `start` to `end` - 1, counted over all ranges."""
        return Drawn(epoch=self.epoch, ranges=self._between(start, end))

    def _between(self, start: int, end: int) -> tuple[Range, ...]:
        """Return the ranges of the samples with the indices `start` to `end` - 1, counted over all ranges."""
        found: list[Range] = []
        passed = 0
        for each in self.ranges:
            first, last = max(start - passed, 0), min(end - passed, each.count)
            if first < last:
                found.append(Range(start=each.start + first, count=last - first))
            passed += each.count
        return tuple(found)


@stored("samples")
@dataclass
class Samples:
    """The states of all samples of a job."""

    per_epoch: int
    epochs: int
    least: int = 1  # smallest number of samples that may be drawn at a time, or left in an epoch
    _epoch: int = 0  # epoch of the fresh samples, from 0
    _next: int = 0  # position of the first fresh sample in that epoch
    _returned: dict[int, list[Range]] = field(default_factory=dict[int, list[Range]])  # by epoch
    _unsettled: Counter[int] = field(default_factory=Counter[int])  # number of unsettled samples, by epoch
    completed: int = 0  # never falls, even if settled samples are returned

    @classmethod
    def beginning(cls, per_epoch: int, epochs: int, least: int, epoch: int) -> Samples:
        """Create the samples of a job that begins with epoch `epoch`, as if all earlier epochs were complete.

        Args:
            least: smallest number of samples that may be drawn at a time, or left in an epoch.
        """
        epoch = min(epoch, epochs)
        return cls(per_epoch, epochs, least, _epoch=epoch, completed=epoch)

    def draw(self, most: int) -> Drawn | None:
        """Draw up to `most` samples of the oldest epoch that has samples left; returned ones come first.

        The number is raised or cut so that neither the draw nor the rest of the epoch has fewer than `least`
        samples.

        Returns:
            The samples, now unsettled; None if no samples are left.
        """
        epoch = min(self._returned, default=self._epoch)
        most = self._at_once(most, self.left_of(epoch))
        ranges: list[Range] = []
        returned = self._returned.get(epoch, [])
        while returned and most:
            first = returned.pop(0)
            if first.count > most:
                returned.insert(0, Range(start=first.start + most, count=first.count - most))
                first = Range(start=first.start, count=most)
            ranges.append(first)
            most -= first.count
        if not returned:
            self._returned.pop(epoch, None)
        if most and epoch == self._epoch < self.epochs:
            count = min(most, self.per_epoch - self._next)
            ranges.append(Range(start=self._next, count=count))
            self._next += count
            if self._next == self.per_epoch:
                self._epoch, self._next = self._epoch + 1, 0
        if not ranges:
            return None
        drawn = Drawn(epoch=epoch, ranges=tuple(ranges))
        self._unsettled[epoch] += drawn.count
        return drawn

    def peek(self, most: int) -> Drawn | None:
        """Return the fresh samples that `draw(most)` would return, without drawing them.

        Returns:
            None if no samples are left, or if returned samples are waiting.
        """
        count = self._at_once(most, self.per_epoch - self._next)
        if self._returned or not count or self._epoch == self.epochs:
            return None
        return Drawn(epoch=self._epoch, ranges=(Range(start=self._next, count=count),))

    def has_more_of(self, epoch: int) -> bool:
        """Return True if `draw` would return samples of this epoch."""
        return min(self._returned, default=self._epoch) == epoch and self.left_of(epoch) > 0

    def settle(self, drawn: Drawn) -> None:
        """Mark unsettled samples as settled: they are trained on, or their gradient is in a worker's
        residual."""
        self._unsettled[drawn.epoch] -= drawn.count
        self._count_completed()

    def give_back(self, drawn: Drawn, *, settled: bool = False) -> None:
        """Requeue assigned samples, so that they are drawn again."""
        if not settled:
            self._unsettled[drawn.epoch] -= drawn.count
        self._returned[drawn.epoch] = _merged([*self._returned.get(drawn.epoch, ()), *drawn.ranges])

    def take_back(self, drawn: Drawn, *, settled: bool = True) -> bool:
        """Undo `give_back`: remove the samples from the queue of samples to draw again.

        Nothing changes if some of them were drawn again meanwhile, or if the rest of an earlier epoch would
        be too few samples to train on.

        Returns:
            True if the samples were removed; False if nothing has changed.
        """
        returned = self._returned.get(drawn.epoch, [])
        left = [piece for each in returned for piece in _without(each, drawn.ranges)]
        rest = sum(each.count for each in left)
        if sum(each.count for each in returned) - rest < drawn.count:
            return False
        if 0 < rest < self.least and drawn.epoch < self._epoch:  # too few to train on
            return False
        self._returned[drawn.epoch] = left
        if not left:
            del self._returned[drawn.epoch]
        if not settled:
            self._unsettled[drawn.epoch] += drawn.count
        self._count_completed()
        return True

    @property
    def left_of_epoch(self) -> int:
        """Number of samples left to draw in the oldest epoch that has any."""
        return self.left_of(min(self._returned, default=self._epoch))

    @property
    def left(self) -> int:
        """Number of samples left to draw in all epochs."""
        return self._given_back + (self.epochs - self._epoch) * self.per_epoch - self._next

    def _at_once(self, most: int, left: int) -> int:
        """Return the number of samples to draw next: about `most`, but no rest of fewer than `least`
        stays."""
        count = min(max(most, self.least), left)
        return left if left - count < self.least else count

    def draws(self, most: int) -> int:
        """Return the number of calls of `draw(most)` that return samples until none are left."""
        present = {*self._returned, self._epoch} if self._epoch < self.epochs else self._returned
        whole = max(0, self.epochs - self._epoch - 1)
        of_present = sum(draws(self.left_of(epoch), most, self.least) for epoch in present)
        return of_present + whole * draws(self.per_epoch, most, self.least)

    def left_of(self, epoch: int) -> int:
        """Return the number of samples left to draw in an epoch that is not later than the present one."""
        fresh = self.per_epoch - self._next if epoch == self._epoch < self.epochs else 0
        return fresh + sum(each.count for each in self._returned.get(epoch, ()))

    @property
    def _given_back(self) -> int:
        return sum(each.count for ranges in self._returned.values() for each in ranges)

    @property
    def done(self) -> bool:
        """True when every sample of every epoch is settled."""
        return self.completed == self.epochs and not self._returned and self.settled

    @property
    def settled(self) -> bool:
        """True while no sample is unsettled."""
        return not any(self._unsettled.values())

    @property
    def progress(self) -> float:
        """Number of settled samples, in epochs, with a fraction."""
        open_ = self._given_back + sum(self._unsettled.values())
        return max(0.0, self._epoch + (self._next - open_) / self.per_epoch) if self.per_epoch else 0.0

    def _count_completed(self) -> None:
        while (
            self.completed < self._epoch
            and self.completed not in self._returned
            and not self._unsettled.get(self.completed)
        ):
            self._unsettled.pop(self.completed, None)
            self.completed += 1


def _merged(ranges: Sequence[Range]) -> list[Range]:
    """Return the ranges in order, with adjacent ones joined."""
    merged: list[Range] = []
    for each in sorted(ranges, key=lambda each: each.start):
        last = merged[-1] if merged else None
        if last is not None and last.start + last.count == each.start:
            merged[-1] = Range(start=last.start, count=last.count + each.count)
        else:
            merged.append(each)
    return merged


def _without(whole: Range, parts: Sequence[Range]) -> list[Range]:
    """Return the pieces of the range `whole` that are left after `parts` are removed."""
    pieces: list[Range] = []
    start, end = whole.start, whole.start + whole.count
    for part in sorted(parts, key=lambda part: part.start):
        if part.start + part.count <= start or part.start >= end:
            continue
        if part.start > start:
            pieces.append(Range(start=start, count=part.start - start))
        start = max(start, part.start + part.count)
    if start < end:
        pieces.append(Range(start=start, count=end - start))
    return pieces
