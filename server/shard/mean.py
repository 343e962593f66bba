"""The mean gradient of a round, part by part: over all samples, or decoded.

Each push is weighted with its part of the samples, or with the weight that decodes a coded round. Where the
members of a group push different slices of the parts, that goes for each slice by itself, over those who
pushed it: a group of which one member had nothing to push is missing in that slice alone. Terms are added in
the order given.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from ...compressors import Payload, reduce_payloads
from ..job.events import Contribution

Float32 = npt.NDArray[np.float32]
Payloads = Sequence[Payload]  # of one part, end to end
Push = Mapping[int, Payloads]  # by part; a part that is empty contributes nothing
Share = tuple[Contribution, Payloads]


def weights(
    contributions: Sequence[Contribution], weight: float, among: Sequence[Contribution] | None = None
) -> list[float]:
    """Return the factors of the pushes, whose sum is then the mean times `weight`. among: all that have
    samples in the round, where these are other parts of it."""
    samples: dict[int, int] = {}
    for each in contributions if among is None else among:
        samples[each.slice] = samples.get(each.slice, 0) + each.samples
    # What a worker had held back outside of its slice is added with the weight of its slice.
    return [
        (each.samples / samples[each.slice] if each.weight is None else each.weight) * weight
        for each in contributions
    ]


def add_up(pushes: Sequence[Payloads], weights: Sequence[float], out: Float32, *, keep: bool = False) -> None:
    """Overwrite `out` with the weighted sum of what workers pushed of a part: float32, shape (elements,).

    keep: add to what `out` holds instead; then sparse payloads touch their own elements only.
    """
    start = 0
    for end, group in _segments(pushes, out.size):
        if all(len(payloads) == 1 for payloads in group):
            reduce_payloads([payloads[0] for payloads in group], weights, out[start:end], keep=keep)
        else:  # from other compressors, with other borders
            if not keep:
                out[start:end] = 0.0
            for payloads, weight in zip(group, weights, strict=True):
                at = start
                for payload in payloads:
                    reduce_payloads([payload], [weight], out[at : at + payload.elements], keep=True)
                    at += payload.elements
        start = end


def _segments(pushes: Sequence[Payloads], elements: int) -> list[tuple[int, list[Payloads]]]:
    """The part from one border that all pushes have to the next: where it ends, and their payloads of it."""
    if not pushes:
        return [(elements, [])]
    ends = [list(accumulate(payload.elements for payload in payloads)) for payloads in pushes]
    if all(each == ends[0] for each in ends[1:]):
        return [(end, [payloads[n : n + 1] for payloads in pushes]) for n, end in enumerate(ends[0])]
    found: list[tuple[int, list[Payloads]]] = []
    done = [0] * len(pushes)
    for end in sorted(set(ends[0]).intersection(*ends[1:])):
        upto = [bisect_left(each, end) + 1 for each in ends]
        parts = zip(pushes, done, upto, strict=True)
        found.append((end, [payloads[first:last] for payloads, first, last in parts]))
        done = upto
    return found
