"""Find the elements of a part that have a gradient: a step may have none for some tensors, or from some
pushes.

A push says so with absent payloads, of whole tensors. As DDP has it, a tensor that no push has is passed over
by the optimizer, which does not count the step either; a tensor that some have counts as zeros of the others,
which keep their weight.
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
    """Elements of a part that some pushes have, and the others have nothing of.

    start, end: counted from the beginning of the part. pushes: what each has of them, end to end; an absent
    payload if nothing.
    """

    start: int
    end: int
    pushes: Sequence[Payloads]


def stretches(pushes: Sequence[Payloads]) -> list[Stretch]:
    """Return the stretches of a part that a push has, ascending. pushes: of the part, end to end."""
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
        Stretch(start, end, [piece[place] for piece in pieces])
        for place, (start, end) in enumerate(pairwise(ordered))
    ]
    return [stretch for stretch in found if not all(map(absent, stretch.pushes))]


def ranges(found: Sequence[Stretch]) -> list[tuple[int, int]]:
    """Where there is something: start and end of what lies together, ascending and apart."""
    merged: list[tuple[int, int]] = []
    for each in found:
        if merged and merged[-1][1] == each.start:
            merged[-1] = merged[-1][0], each.end
        else:
            merged.append((each.start, each.end))
    return merged


def absent(payloads: Payloads) -> bool:
    """Whether there is nothing in them."""
    return all(isinstance(payload, AbsentPayload) for payload in payloads)


def filled(push: Push, among: Sequence[Push]) -> Push:
    """A push with zeros for what it has nothing of and others have. among: all of the round, and itself."""
    return {number: _filled(payloads, number, among) for number, payloads in push.items()}


def _filled(payloads: Payloads, part: int, among: Sequence[Push]) -> Payloads:
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
    """A gradient of nothing but zeros."""
    none = dense_payload(DenseFormat.FLOAT32, np.empty(0, np.float32))
    return sparse_payload(elements, np.empty(0, np.uint32), none)


def _split(payloads: Payloads, borders: Sequence[int]) -> list[list[Payload]]:
    """The same from each border to the next one."""
    found: list[list[Payload]] = [[] for _ in borders[1:]]
    end = 0
    for payload in payloads:
        begin, end = end, end + payload.elements
        if begin == end:
            continue
        first, last = bisect_right(borders, begin), bisect_left(borders, end)
        inside = [begin, *borders[first:last], end]
        pieces = cut_at(payload, [border - begin for border in inside])
        for place, piece in enumerate(pieces, start=first - 1):
            found[place] += piece
    return found
