"""How a round is divided among its members, and when enough pushes have arrived.

    Division        each member computes samples of its own, and pushes the whole gradient
    Sliced          members form groups; those of a group compute the same samples, and each pushes its slice
                    of every tensor (`sync:redundancy=R`)
    StragglerCoded  each member computes several parts of the samples, and pushes one combination of them, so
                    that all pushes but any S suffice for the sum over all parts (`sync:stragglers=S`)

    InParts         like Division, but the shard steps a part once every member has pushed it
                    (`--overlap both`)

A round has one slot for each share. A plain round closes without the slot of a lost member, and its samples
are drawn again. The others cannot: samples that other members compute too would count twice, and a stepped
part of a lost member's push cannot be taken out. There another member takes over the slot, unless the round
can do without it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ....coding import parts_of, straggler_code
from ....common.stored import stored
from ....proto.shares import share
from ..samples import Drawn, Samples
from .sync import SyncOptions


@stored("round-part")
@dataclass(frozen=True, kw_only=True, slots=True)
class SampleShare:
    """The share of a slot. drawn: the samples of its assignment; in a straggler code all of the round.
    samples: number of samples that its push stands for. The others are fields of `Assignment`."""

    drawn: Drawn
    samples: int
    position: int
    world: int
    slice: int = 0
    slices: int = 0
    stragglers: int = 0


@stored("division")
@dataclass(frozen=True, kw_only=True, slots=True)
class Division:
    """parts: one share for each slot, in rank order. needed: pushes that suffice. note: how the division
    differs from the options, for the log; empty if it does not.

    Arguments of the methods are answered: by slot, the number of samples behind its push, 0 for a skipped
    step; lost: slots of lost members; open_: how many slots have neither answered nor been lost.
    """

    parts: tuple[SampleShare, ...]
    needed: int
    note: str = ""

    def portions(self) -> list[tuple[Drawn, list[int]]]:
        """Return samples that are settled or given back together, with the slots that compute them."""
        return [(part.drawn, [slot]) for slot, part in enumerate(self.parts)]

    def vacant(self, answered: Mapping[int, int], lost: Collection[int], open_: int) -> list[int]:
        """Return the slots of lost members that other members have to take over."""
        return []

    def complete(self, answered: Mapping[int, int], lost: Collection[int], open_: int) -> bool:
        """Return whether enough pushes have arrived."""
        return not open_ or len(answered) >= self.needed

    def weights(self, answered: Mapping[int, int]) -> Mapping[int, float] | None:
        """Return the weights of pushes by slot, 0 for a missing one; None to weight them by samples."""
        return None


@stored("division-in-parts")
class InParts(Division):
    __slots__ = ()

    def vacant(self, answered: Mapping[int, int], lost: Collection[int], open_: int) -> list[int]:
        return [slot for slot in sorted(lost) if slot not in answered]

    def complete(self, answered: Mapping[int, int], lost: Collection[int], open_: int) -> bool:
        return not open_ and not self.vacant(answered, lost, open_)


@stored("division-in-slices")
class Sliced(Division):
    __slots__ = ()

    def portions(self) -> list[tuple[Drawn, list[int]]]:
        slices = self.parts[0].slices
        groups = [list(range(first, first + slices)) for first in range(0, len(self.parts), slices)]
        return [(self.parts[slots[0]].drawn, slots) for slots in groups]

    def vacant(self, answered: Mapping[int, int], lost: Collection[int], open_: int) -> list[int]:
        """A lost slice is needed if another member of its group has pushed, or still may."""
        missing: list[int] = []
        for _, slots in self.portions():
            absent = [slot for slot in slots if slot in lost and slot not in answered]
            if len(absent) < len(slots):
                missing += absent
        return missing

    def complete(self, answered: Mapping[int, int], lost: Collection[int], open_: int) -> bool:
        return not open_ and not self.vacant(answered, lost, open_)


@stored("division-straggler-coded")
class StragglerCoded(Division):
    __slots__ = ()

    def portions(self) -> list[tuple[Drawn, list[int]]]:
        return [(self.parts[0].drawn, list(range(len(self.parts))))]

    def _usable(self, answered: Mapping[int, int]) -> list[int]:
        return [slot for slot, samples in sorted(answered.items()) if samples]

    def vacant(self, answered: Mapping[int, int], lost: Collection[int], open_: int) -> list[int]:
        """Return the slots that the code lacks even if every open slot is answered."""
        expected = len(self._usable(answered)) + open_
        absent = [slot for slot in sorted(lost) if slot not in answered]
        return absent[: max(0, self.needed - expected)]

    def complete(self, answered: Mapping[int, int], lost: Collection[int], open_: int) -> bool:
        if len(answered) >= self.needed and len(self._usable(answered)) >= self.needed:
            return True
        return not open_ and not self.vacant(answered, lost, open_)

    def weights(self, answered: Mapping[int, int]) -> Mapping[int, float]:
        """Like `Division.weights`; empty if too many skipped the step: then the round is skipped too."""
        usable = self._usable(answered)
        if len(usable) < self.needed:
            return {}
        code = straggler_code(len(self.parts), self.parts[0].stragglers)
        total = self.parts[0].drawn.count
        found = zip(usable, code.decoding_weights(usable), strict=True)
        return {slot: weight * self.parts[slot].samples / total for slot, weight in found}


def divide(
    wanted: SyncOptions,
    samples: Samples,
    each: int,
    idle: int,
    late: int,
    *,
    in_parts: bool = False,
    everybody: bool = False,
) -> Division | None:
    """Draw a round's samples and divide them.

    Args:
        each: samples for a member.
        idle: number of members that can take part.
        late: number of other members, which still compute for a round that has closed.
        in_parts: step a plain round part by part.
        everybody: where an epoch would leave too few samples for all members, share the rest among this
            round and the next.

    Returns:
        None if no samples are left. At the end of an epoch there may be fewer shares than members.
    """
    most, left = each * idle, samples.left_of_epoch
    if everybody and most < left < most + idle and left // 2 >= idle:
        most = left // 2
    drawn = samples.draw(most)
    if drawn is None:
        return None
    slices = largest_divisor(idle, wanted.redundancy)
    note = ""
    if slices != wanted.redundancy:
        note = f"redundancy={wanted.redundancy}: a round of {idle} members is divided in groups of {slices}"
    if slices > 1:
        return _sliced(drawn, idle, slices, note, samples.least)
    world = max(1, min(idle, drawn.count // samples.least))
    stragglers = min(max(0, wanted.stragglers - late), world - 1)
    if stragglers:
        return _coded(drawn, world, stragglers)
    parts = tuple(
        SampleShare(drawn=part, samples=part.count, position=position, world=world)
        for position, part in enumerate(drawn.divided(idle, samples.least))
    )
    kind = InParts if in_parts else Division
    return kind(parts=parts, needed=max(1, min(world, world + late - wanted.backup)), note=note)


def _sliced(drawn: Drawn, members: int, slices: int, note: str, least: int) -> Sliced:
    groups = drawn.divided(members // slices, least)
    parts = tuple(
        SampleShare(
            drawn=part,
            samples=part.count,
            position=position,
            world=len(groups),
            slice=number,
            slices=slices,
        )
        for position, part in enumerate(groups)
        for number in range(slices)
    )
    return Sliced(parts=parts, needed=len(parts), note=note)


def _coded(drawn: Drawn, world: int, stragglers: int) -> StragglerCoded:
    bounds = [share(drawn.count, part, world) for part in range(world)]
    sizes = [end - start for start, end in bounds]
    parts = tuple(
        SampleShare(
            drawn=drawn,
            samples=sum(sizes[part] for part in parts_of(position, world, stragglers)),
            position=position,
            world=world,
            stragglers=stragglers,
        )
        for position in range(world)
    )
    return StragglerCoded(parts=parts, needed=world - stragglers)


def largest_divisor(number: int, most: int) -> int:
    """The largest divisor of `number` that is at most `most`."""
    return next(divisor for divisor in range(min(number, most), 0, -1) if number % divisor == 0)
