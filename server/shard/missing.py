"""Missing gradients: finds the elements of a part that have a gradient, where a push lacks some tensors.

A push marks missing tensors with absent payloads, of whole tensors. As in DDP, the optimizer skips a tensor
that no push has, and does not count a step for it. If some pushes have the tensor, it counts as zeros in the
other pushes, which keep their weight.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ...compressors import AbsentPayload, DenseFormat, Payload, cut_at, dense_payload, sparse_payload
from .mean import Payloads, Push


@dataclass(frozen=True, slots=True, eq=False)
class Stretch:
    """A range of a part's elements for which each push has either a gradient throughout or none.

    Attributes:
        start: first element of the range, counted from the beginning of the part.
        end: element after the last one, counted likewise.
        pushes: payloads of the range from each push, end to end; an absent payload where the push has no
            gradient.
    """

    start: int
    end: int
    pushes: Sequence[Payloads]


def stretches(pushes: Sequence[Payloads]) -> list[Stretch]:
    """Return the ranges of a part for which at least one push has a gradient, ascending. pushes: payloads of
    the whole part from each push, end to end; at least one push."""
    elements = sum(payload.elements for payload in pushes[0])
    borders = {0, elements}
    for push in pushes:
        end = 0
        for payload in push:
            start, end = end, end + payload.elements
            if isinstance(payload, AbsentPayload):
                borders |= {start, end}
    if len(borders) == 2 and not all(map(absent, pushes)):
        return [Stretch(0, elements, pushes)]
    ordered = sorted(borders)
    pieces = [_split(push, ordered) for push in pushes]
    found = [
        Stretch(start, end, [piece[index] for piece in pieces])
        for index, (start, end) in enumerate(pairwise(ordered))
    ]
    return [stretch for stretch in found if not all(map(absent, stretch.pushes))]


def ranges(found: Sequence[Stretch]) -> list[tuple[int, int]]:
    """Return the (start, end) of the elements that have a gradient, ascending, with neighbouring stretches
    merged."""
    merged: list[tuple[int, int]] = []
    for each in found:
        if merged and merged[-1][1] == each.start:
            merged[-1] = merged[-1][0], each.end
        else:
            merged.append((each.start, each.end))
    return merged


def without(among: Sequence[tuple[int, int]], taken: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the (start, end) of ranges without others that lie in them. Both are ascending."""
    left: list[tuple[int, int]] = []
    for start, end in among:
        at = start
        for first, last in taken:
            if start <= first < end:
                left.append((at, first))
                at = last
        left.append((at, end))
    return [(start, end) for start, end in left if start < end]


def absent(payloads: Payloads) -> bool:
    """Return True when all payloads are absent, which means that there is no gradient."""
    return all(isinstance(payload, AbsentPayload) for payload in payloads)


def filled(push: Push, among: Sequence[Push]) -> Push:
    """Return the push with zeros in place of gradients that it lacks and that some other push has.

    Args:
        push: push to fill.
        among: all pushes of the round, `push` included.
    """
    return {number: _filled(payloads, number, among) for number, payloads in push.items()}


def _filled(payloads: Payloads, part: int, among: Sequence[Push]) -> Payloads:
    """Return the payloads of a part with zeros for ranges that are absent here but not in every push of
    `among`."""
    if not any(isinstance(payload, AbsentPayload) for payload in payloads):
        return payloads
    whole: list[Payload] = []
    at = 0
    for stretch in stretches([payloads, *(push[part] for push in among if push.get(part))]):
        if at < stretch.start:
            whole.append(AbsentPayload(elements=stretch.start - at))
        own, at = stretch.pushes[0], stretch.end
        whole += [_zeros(stretch.end - stretch.start)] if absent(own) else own
    left = sum(payload.elements for payload in payloads) - at
    return [*whole, AbsentPayload(elements=left)] if left else whole


def _zeros(elements: int) -> Payload:
    """Return a gradient of zeros, as a sparse payload without elements."""
    none = dense_payload(DenseFormat.FLOAT32, np.empty(0, np.float32))
    return sparse_payload(elements, np.empty(0, np.uint32), none)


def _split(payloads: Payloads, borders: Sequence[int]) -> list[list[Payload]]:
    """Return the payloads between each border and the next one, as one list for each such range."""
    found: list[list[Payload]] = [[] for _ in borders[1:]]
    end = 0
    for payload in payloads:
        begin, end = end, end + payload.elements
        if begin == end:
            continue
        first, last = bisect_right(borders, begin), bisect_left(borders, end)
        inside = [begin, *borders[first:last], end]
        pieces = cut_at(payload, [border - begin for border in inside])
        for index, piece in enumerate(pieces, start=first - 1):
            found[index] += piece
    return found
