"""The mean gradient of a round, part by part: over all samples, or with decoding weights.

Each push is weighted with its share of the samples, or with the weight that decodes a coded round. Where the
members of a group push different slices of each part, every slice has a mean of its own, over the members
that pushed it. If a member of a group pushes nothing, the group is missing in that slice alone. Terms are
added in the order given.
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
Payloads = Sequence[Payload]  # the payloads of one part, end to end
Push = Mapping[int, Payloads]  # by part; a part that is empty contributes nothing
Share = tuple[Contribution, Payloads]


def weights(
    contributions: Sequence[Contribution], weight: float, among: Sequence[Contribution] | None = None
) -> list[float]:
    """Return the factor of each push, in order, such that the weighted sum of the pushes is their mean times
    `weight`.

    Args:
        contributions: the pushes that are summed.
        weight: multiplies the mean.
        among: all contributions of the round that have samples, if only some of them are summed here; None if
            `contributions` are all.
    """
    samples: dict[int, int] = {}
    for each in contributions if among is None else among:
        samples[each.slice] = samples.get(each.slice, 0) + each.samples
    # A residual outside of the worker's own slice is added with the weight of that slice.
    return [
        (each.samples / samples[each.slice] if each.weight is None else each.weight) * weight
        for each in contributions
    ]


def add_up(pushes: Sequence[Payloads], weights: Sequence[float], out: Float32, *, keep: bool = False) -> None:
    """Overwrite `out` with the weighted sum of the payloads that workers pushed of a part.

    Args:
        pushes: payloads of the part from each worker, end to end.
        weights: factor of each worker's payloads, in the same order.
        out: receives the sum: float32, shape (elements of the part,).
        keep: add the sum to the content of `out` instead; sparse payloads then touch their own elements only.
    """
    start = 0
    for end, group in segments(pushes) or [(out.size, [])]:
        if all(len(payloads) == 1 for payloads in group):
            reduce_payloads([payloads[0] for payloads in group], weights, out[start:end], keep=keep)
        else:  # payloads of different compressors, whose borders differ
            if not keep:
                out[start:end] = 0.0
            for payloads, weight in zip(group, weights, strict=True):
                at = start
                for payload in payloads:
                    reduce_payloads([payload], [weight], out[at : at + payload.elements], keep=True)
                    at += payload.elements
        start = end


def segments(pushes: Sequence[Payloads]) -> list[tuple[int, list[Payloads]]]:
    """Return the pieces of a part between borders that all pushes share: where each piece ends, and its
    payloads by push. There is none without a push."""
    if not pushes:
        return []
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
