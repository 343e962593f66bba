"""How a model is divided into parts, which are sent, summed, stepped and sent back one by one.

The elements of all tensors, laid end to end in manifest order, are the *flat* order. A part is a range of it.
Parts come in the order in which backward produces gradients: the last tensors first. The list of parts is the
*plan*. It is the server's, belongs to the job and has a number: the first follows from the sizes and
parameter groups of the tensors and the size of a part (`divide`), and a later one may divide the model in any
other way that `arrange` can.

A *unit* is what is compressed at once: several small tensors that make up one part, or one large tensor that
is cut into several. So whatever a compressor finds out about a tensor, it finds out about all of it, and the
result does not depend on where parts begin.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

# Cuts within a tensor are at multiples of so many elements: every coding has a border of its own there.
ALIGNMENT = 4096
# A part is at most such a share of the model by default, but not less than the bytes below, as float32:
# 256 KiB on their way at four bits per element.
SHARE = 32
LEAST_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class Part:
    """start, end: of its elements in flat order."""

    start: int
    end: int

    @property
    def elements(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Unit:
    """first, last: its tensors are from `first` up to, but not including, `last`. parts: numbers of its
    parts, ascending like their elements. start, end: of its elements in flat order."""

    first: int
    last: int
    parts: range
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Plan:
    """starts: of each tensor in flat order, and the end of the last. number: the first of a job has 1.

    merged: sparsifiers choose among all elements of a unit, not of each tensor by itself. turns: by part; of
    parts that wait to be sent, the one with the least goes first; if empty, they go as they come. credit:
    parts of a worker that may be on their way at once; 0 for as many as there are. norms: by tensor, the
    Euclidean norm of its first parameters; empty where nobody knows.
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
        """By tensor, the number of its unit."""
        return [
            n
            for n, unit in sorted(enumerate(self.units), key=lambda each: each[1].first)
            for _ in range(unit.first, unit.last)
        ]

    def slice(self, number: int, count: int) -> frozenset[int]:
        """Which parts are slice `number` of `count`: each part is in one, and they are about equally
        large."""
        total = max(1, self.elements)
        ends = accumulate(part.elements for part in self.parts)
        middles = [end - part.elements / 2 for end, part in zip(ends, self.parts, strict=True)]
        last = count - 1  # also of an empty part at the end
        return frozenset(
            place for place, middle in enumerate(middles) if min(last, int(middle * count / total)) == number
        )


def divide(
    elements: Sequence[int],
    part_bytes: int = 0,
    slices: int = 1,
    groups: Sequence[int] = (),
    least_bytes: int = LEAST_BYTES,
) -> Plan:
    """The first plan of a model.

    Args:
        elements: of each tensor, in manifest order.
        part_bytes: of the largest part, as float32; 0 for the default, see `SHARE`. A tensor that is larger
            is cut into equal parts.
        slices: that members of a group divide the parts among themselves in; there are several for each.
        groups: parameter group of each tensor; all of one if empty. No unit has tensors of two of them, and
            so no part has.
        least_bytes: of the largest part by default, as float32.
    """
    starts = (0, *accumulate(elements))
    most = largest_part(starts[-1], part_bytes, slices, least_bytes)
    units: list[int] = []
    last = len(elements)
    while last:
        first = last - 1
        while first and starts[last] - starts[first - 1] <= most and _alike(groups, first):
            first -= 1
        units.append(last - first)
        last = first
    return cut_up(elements, units, most)


def largest_part(elements: int, part_bytes: int = 0, slices: int = 1, least_bytes: int = LEAST_BYTES) -> int:
    """Elements of the largest part of a model of so many. The rest is as in `divide`."""
    part_bytes = part_bytes or max(least_bytes, 4 * elements // SHARE)
    if slices > 1:
        part_bytes = min(part_bytes, 4 * elements // (4 * slices))
    return max(ALIGNMENT, part_bytes // 4)


def cut_up(elements: Sequence[int], units: Sequence[int], most: int) -> Plan:
    """The first plan with these units, as in `arrange`. One tensor that is a unit by itself and has more than
    `most` elements is cut into equal parts."""
    starts = (0, *accumulate(elements))
    cuts: list[int] = []
    last = len(elements)
    for tensors in units:
        first = last - tensors
        start, end = starts[first], starts[last]
        if tensors == 1 and end - start > most:
            pieces = -(-(end - start) // (most // ALIGNMENT * ALIGNMENT))
            size = -(-(end - start) // pieces // ALIGNMENT) * ALIGNMENT
            cuts += range(start + size, end, size)
        last = first
    return arrange(elements, units, sorted(cuts))


def arrange(elements: Sequence[int], units: Sequence[int], cuts: Sequence[int], number: int = 1) -> Plan:
    """A plan as it was asked for.

    Args:
        elements: of each tensor, in manifest order.
        units: by unit, how many tensors it has: at least 1 each, the last ones first, all of them together.
        cuts: elements in flat order, ascending, that begin another part of their unit: inside units of one
            tensor, at multiples of `ALIGNMENT` in it.
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


def _alike(groups: Sequence[int], place: int) -> bool:
    """Whether a tensor and the one before it are of one group."""
    return not groups or groups[place - 1] == groups[place]
