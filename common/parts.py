"""The division of a model into parts, each of which is sent, summed, stepped and sent back as one.

The elements of all tensors, laid end to end in manifest order, are the *flat* order. A *part* is a range of
it. Parts are numbered in the order in which backward produces gradients: the last tensors first. The list of
parts is the *plan*. It belongs to the server and has a number within the job. `divide` computes the first
plan from the sizes of the tensors and the size of a part. A later plan may divide the
model in any way that `arrange` accepts.

A *unit* is a group of tensors that are compressed at once: several small tensors that make up one part, or
one large tensor that is cut into several parts. A compressor therefore computes its statistics over whole
tensors, and its result does not depend on where parts begin.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

# Cuts within a tensor are at multiples of this number of elements, where the codes of every payload format
# begin at a whole byte and at the start of a bucket.
ALIGNMENT = 4096
# By default a part is at most 1 / SHARE of the model, but may always hold LEAST_BYTES as float32, which are
# 256 KiB on the link at four bits per element.
SHARE = 32
LEAST_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class Part:
    """A range of elements in flat order, which is sent, summed, stepped and sent back as one."""

    start: int
    end: int

    @property
    def elements(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Unit:
    """Consecutive tensors that are compressed at once, and the parts that they make up.

    Attributes:
        first: index of its first tensor in manifest order.
        last: index after its last tensor.
        parts: numbers of its parts, ascending like their elements.
        start: index of its first element in flat order.
        end: index after its last element.
    """

    first: int
    last: int
    parts: range
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Plan:
    """How a model is divided into parts. The server makes it; workers receive it and follow it.

    Attributes:
        parts: the parts, in the order in which backward produces their gradients.
        units: the units, in the same order.
        starts: index in flat order of the first element of each tensor, and the total number of elements.
        number: number of the plan within the job, from 1.
        merged: True if a sparsifier chooses from all elements of a unit as from one tensor.
        turns: priority of each part; of several parts that wait to be sent, the one with the smallest goes
            first. Empty if parts are sent in the order in which they become ready.
        credit: number of parts of one worker that may be in flight at once; 0 for no limit.
        norms: Euclidean norm of the first parameters of each tensor; empty if not known.
    """

    parts: tuple[Part, ...]
    units: tuple[Unit, ...]
    starts: tuple[int, ...]
    number: int = 1
    merged: bool = False
    turns: tuple[int, ...] = ()
    credit: int = 0
    norms: tuple[float, ...] = ()

    @property
    def elements(self) -> int:
        return self.starts[-1]

    def unit_of(self) -> list[int]:
        """Return the number of the unit of each tensor, in manifest order."""
        return [
            n
            for n, unit in sorted(enumerate(self.units), key=lambda each: each[1].first)
            for _ in range(unit.first, unit.last)
        ]

    def slice(self, number: int, count: int) -> frozenset[int]:
        """Return the numbers of the parts in slice `number` of `count` slices.

        Every part belongs to one slice, and the slices hold about equally many elements.
        """
        total = max(1, self.elements)
        ends = accumulate(part.elements for part in self.parts)
        middles = [end - part.elements / 2 for end, part in zip(ends, self.parts, strict=True)]
        last = count - 1  # an empty part at the end has its middle at the total, one past the last slice
        return frozenset(
            index for index, middle in enumerate(middles) if min(last, int(middle * count / total)) == number
        )


def divide(
    elements: Sequence[int],
    part_bytes: int = 0,
    slices: int = 1,
    least_bytes: int = LEAST_BYTES,
    uncut: Collection[int] = (),
) -> Plan:
    """Return the first plan of a model: neighbouring tensors are merged into units up to the size of a part.

    Args:
        elements: number of elements of each tensor, in manifest order.
        part_bytes: size of the largest part as float32, in bytes; 0 for the default, see `largest_part`. A
            larger tensor is cut into equal parts.
        slices: number of slices among which redundant workers divide the parts; parts are small enough that
            each slice gets several.
        least_bytes: size that the largest part has at least by default, as float32, in bytes.
        uncut: indices of tensors that are in one part each, however large.
    """
    starts = (0, *accumulate(elements))
    most = largest_part(starts[-1], part_bytes, slices, least_bytes)
    units: list[int] = []
    last = len(elements)
    while last:
        first = last - 1
        while first and starts[last] - starts[first - 1] <= most:
            first -= 1
        units.append(last - first)
        last = first
    return cut_up(elements, units, most, uncut)


def largest_part(elements: int, part_bytes: int = 0, slices: int = 1, least_bytes: int = LEAST_BYTES) -> int:
    """Return the number of elements of the largest part of a model.

    The arguments are those of `divide`: by default it is 1 / `SHARE` of the model, and each slice gets at
    least four parts' worth of elements.
    """
    part_bytes = part_bytes or max(least_bytes, 4 * elements // SHARE)
    if slices > 1:
        part_bytes = min(part_bytes, 4 * elements // (4 * slices))
    return max(ALIGNMENT, part_bytes // 4)


def cut_up(elements: Sequence[int], units: Sequence[int], most: int, uncut: Collection[int] = ()) -> Plan:
    """Return the first plan with the given units, cutting large tensors into equal parts.

    Args:
        elements: number of elements of each tensor, in manifest order.
        units: number of tensors of each unit, as for `arrange`: the unit of the last tensors first.
        most: number of elements of the largest part. Only a tensor that is a unit by itself is cut.
        uncut: indices of tensors that are never cut.
    """
    starts = (0, *accumulate(elements))
    cuts: list[int] = []
    last = len(elements)
    for tensors in units:
        first = last - tensors
        start, end = starts[first], starts[last]
        if tensors == 1 and end - start > most and first not in uncut:
            pieces = -(-(end - start) // (most // ALIGNMENT * ALIGNMENT))
            size = -(-(end - start) // pieces // ALIGNMENT) * ALIGNMENT
            cuts += range(start + size, end, size)
        last = first
    return arrange(elements, units, sorted(cuts))


def arrange(elements: Sequence[int], units: Sequence[int], cuts: Sequence[int], number: int = 1) -> Plan:
    """Return a plan with exactly these units and cuts.

    Args:
        elements: number of elements of each tensor, in manifest order.
        units: number of tensors of each unit, at least 1, the unit of the last tensors first; they sum to the
            number of tensors.
        cuts: indices in flat order, ascending, at which another part of a unit begins. They lie inside units
            of one tensor, at multiples of `ALIGNMENT` from its start.
    """
    starts = (0, *accumulate(elements))
    parts: list[Part] = []
    found: list[Unit] = []
    last = len(elements)
    for tensors in units:
        first = last - tensors
        start, end = starts[first], starts[last]
        bounds = [start, *cuts[bisect_right(cuts, start) : bisect_left(cuts, end)], end]
        found.append(Unit(first, last, range(len(parts), len(parts) + len(bounds) - 1), start, end))
        parts += [Part(*pair) for pair in pairwise(bounds)]
        last = first
    return Plan(tuple(parts), tuple(found), starts, number)
