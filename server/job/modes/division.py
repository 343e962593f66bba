"""Division of a round among its members, and the pushes that suffice to close it.

    Division       | each member computes samples of its own, and pushes the whole gradient
    Sliced         | members form groups; those of a group compute the same samples, and each pushes its slice
                   | of every tensor (`sync:redundancy=R`)
    StragglerCoded | each member computes several parts of the samples, and pushes one combination of them, so
                   | that all pushes but any S suffice for the sum over all parts (`sync:stragglers=S`)
    InParts        | like Division, but the shard steps a part once every member has pushed it
                   | (`--overlap both`)

A round has one slot for each share. A plain round closes without the slot of a lost member, and its samples
are drawn again. The other kinds cannot: samples that other members compute too would count twice, and a
stepped part of a lost member's push cannot be taken out of the parameters. In those rounds another member
takes over the slot, unless the round can close without it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Self

from ....common.stored import stored
from ....proto.shares import share, sizes
from ....proto.straggler_code import parts_of, straggler_code
from ..samples import Drawn, Samples


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharing:
    """How the members of a round share its samples."""

    backup: int = 0  # number of members without whose pushes a round may close
    redundancy: int = 1  # number of members that compute the same samples, and push a slice each
    stragglers: int = 0  # stragglers that a round may close without, because of a code


@stored("round-part")
@dataclass(frozen=True, kw_only=True, slots=True)
class SampleShare:
    """The share of one slot of a round."""

    drawn: Drawn  # samples of the slot's assignment; in a straggler code all samples of the round
    samples: int  # number of samples that the slot's push stands for
    position: int  # index of the slot's piece of the samples, a field of `Assignment`
    world: int  # number of pieces that the samples are divided into, a field of `Assignment`
    slice: int = 0  # index of the slice of each tensor that the slot's push carries, a field of `Assignment`
    slices: int = 0  # number of slices of each tensor; 0 if tensors are not sliced
    stragglers: int = 0  # stragglers that a round may close without, because of a code
    batches: tuple[int, ...] = ()  # number of samples of each batch of a script; empty for a task

    def steps(self, at_once: int) -> int:
        """Return the number of optimizer steps that a script takes with it, at `at_once` batches each."""
        return -(-len(self.batches) // at_once)

    def with_more(self, more: SampleShare) -> SampleShare:
        """Return this share followed by the batches of another one of the same slot."""
        return replace(
            self,
            drawn=self.drawn.with_more(more.drawn),
            samples=self.samples + more.samples,
            batches=(self.batches or (self.samples,)) + (more.batches or (more.samples,)),
        )


@stored("division")
@dataclass(frozen=True, kw_only=True, slots=True)
class Division:
    """The shares of a plain round: each member computes samples of its own.

    Its methods take the state of the round:

    - `answered`: number of samples of each accepted push, by slot; 0 for a skipped step.
    - `lost`: slots of lost members.
    - `open_`: number of slots that are neither answered nor lost.
    """

    parts: tuple[SampleShare, ...]  # one share for each slot, in rank order
    needed: int  # number of pushes that suffice to close the round
    note: str = ""  # difference between the division and the options, for the log; empty if there is none

    def with_part(self, slot: int, part: SampleShare) -> Self:
        """Return the division with another share for a slot."""
        return replace(self, parts=(*self.parts[:slot], part, *self.parts[slot + 1 :]))

    def portions(self) -> list[tuple[Drawn, list[int]]]:
        """Return the portions of samples that are settled or requeued together, each with the slots that
        compute it."""
        return [(part.drawn, [slot]) for slot, part in enumerate(self.parts)]

    def vacant(self, answered: Mapping[int, int], lost: Collection[int], open_: int) -> list[int]:
        """Return the slots of lost members that other members have to take over, so that the round can
        close."""
        return []

    def complete(self, answered: Mapping[int, int], lost: Collection[int], open_: int) -> bool:
        """Return True if enough pushes have arrived to close the round."""
        return not open_ or len(answered) >= self.needed

    def weights(self, answered: Mapping[int, int]) -> Mapping[int, float] | None:
        """Return the weight of each slot's push in the sum, by slot.

        Returns:
            None to weight pushes by their samples. A slot that is missing has the weight 0. An empty mapping
                skips the round.
        """
        return None


@stored("division-in-parts")
class InParts(Division):
    """Like `Division`, for a round whose parts are stepped as soon as every member has pushed them."""

    __slots__ = ()

    def vacant(self, answered: Mapping[int, int], lost: Collection[int], open_: int) -> list[int]:
        return [slot for slot in sorted(lost) if slot not in answered]

    def complete(self, answered: Mapping[int, int], lost: Collection[int], open_: int) -> bool:
        return not open_ and not self.vacant(answered, lost, open_)


@stored("division-in-slices")
class Sliced(Division):
    """The shares of a round in groups: the members of a group compute the same samples, and each pushes
    one slice of every tensor."""

    __slots__ = ()

    def portions(self) -> list[tuple[Drawn, list[int]]]:
        slices = self.parts[0].slices
        groups = [list(range(first, first + slices)) for first in range(0, len(self.parts), slices)]
        return [(self.parts[slots[0]].drawn, slots) for slots in groups]

    def vacant(self, answered: Mapping[int, int], lost: Collection[int], open_: int) -> list[int]:
        """Return the lost slots whose slices are needed: another member of their group has pushed, or still
        may.
        """
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
    """The shares of a round with a straggler code: each push combines several parts of the samples."""

    __slots__ = ()

    def portions(self) -> list[tuple[Drawn, list[int]]]:
        return [(self.parts[0].drawn, list(range(len(self.parts))))]

    def _usable(self, answered: Mapping[int, int]) -> list[int]:
        """Return the slots whose pushes have samples, ascending."""
        return [slot for slot, samples in sorted(answered.items()) if samples]

    def vacant(self, answered: Mapping[int, int], lost: Collection[int], open_: int) -> list[int]:
        """Return the lost slots without which the code cannot be decoded, even if every open slot is
        answered.
        """
        expected = len(self._usable(answered)) + open_
        absent = [slot for slot in sorted(lost) if slot not in answered]
        return absent[: max(0, self.needed - expected)]

    def complete(self, answered: Mapping[int, int], lost: Collection[int], open_: int) -> bool:
        if len(answered) >= self.needed and len(self._usable(answered)) >= self.needed:
            return True
        return not open_ and not self.vacant(answered, lost, open_)

    def weights(self, answered: Mapping[int, int]) -> Mapping[int, float]:
        """Return the decoding weight of each slot's push, by slot.

        Returns:
            An empty mapping, which skips the round, if too few pushes have samples.
        """
        usable = self._usable(answered)
        if len(usable) < self.needed:
            return {}
        code = straggler_code(len(self.parts), self.parts[0].stragglers)
        total = self.parts[0].drawn.count
        found = zip(usable, code.decoding_weights(usable), strict=True)
        return {slot: weight * self.parts[slot].samples / total for slot, weight in found}


def divide_batches(
    wanted: Sharing,
    samples: Samples,
    batch_size: int,
    steps: int,
    idle: int,
    late: int,
    *,
    times: int = 1,
    in_parts: bool = False,
    local: bool = False,
) -> Division | None:
    """Draw and divide the samples of a round of scripts, several times in a row: the batches of a worker are
    the same, however many of them an optimizer step takes.

    Args:
        late: number of other members, which still compute for a round that has closed.
        times: number of draws; the end of an epoch ends them.
        in_parts: True to step a plain round part by part.
        local: True if samples that are drawn together may be several batches.

    Returns:
        The division, in which all members have equally many batches, as long as there is a sample for each.
            None if no samples are left.
    """
    found: Division | None = None
    for _ in range(times):
        if found is not None and not samples.has_more_of(found.parts[0].drawn.epoch):
            break
        more = divide(wanted, samples, batch_size, steps, idle, late, in_parts=in_parts, everybody=True)
        if more is None:
            break
        most, fewest = (by(part.drawn.count for part in more.parts) for by in (max, min))
        pieces = min(-(-most // batch_size), max(1, fewest // samples.least)) if local else 1
        parts = tuple(replace(part, batches=sizes(part.drawn.count, pieces)) for part in more.parts)
        if found is None:
            found = replace(more, parts=parts)
            continue
        for slot, part in enumerate(parts):
            found = found.with_part(slot, found.parts[slot].with_more(part))
    return found


def divide(
    wanted: Sharing,
    samples: Samples,
    batch_size: int,
    steps: int,
    idle: int,
    late: int,
    *,
    in_parts: bool = False,
    everybody: bool = False,
) -> Division | None:
    """Draw a round's samples and divide them among its members.

    Args:
        late: number of other members, which still compute for a round that has closed.
        in_parts: True to step a plain round part by part.
        everybody: True to leave enough samples for all members in the last round of an epoch: the last two
            rounds then share the rest equally.

    Returns:
        The division; None if no samples are left. At the end of an epoch it may have fewer shares than
            members.
    """
    most, left, enough = batch_size * steps * idle, samples.left_of_epoch, idle * samples.least
    if everybody and most < left < most + enough and left // 2 >= enough:
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
    """Divide the samples among groups of `slices` members each."""
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
    """Divide the samples by a straggler code for `world` members, of which `stragglers` need not answer."""
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
    """Return the largest divisor of `number` that is at most `most`."""
    return next(divisor for divisor in range(min(number, most), 0, -1) if number % divisor == 0)
