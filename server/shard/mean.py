"""The mean gradient of a round: over all samples, of whole tensors, of slices of them, or decoded.

Each share is weighted with its part of the samples, or with the weight that decodes a coded round. Where
tensors are cut into slices that goes for each slice by itself, over those who pushed it: a group of which one
member had nothing to push is missing in that slice alone. Terms are added in the order given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...compressors import DenseFormat, DensePayload, Payload, decode, reduce_payloads
from ...proto.shares import share as share_of

Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Share:
    """One worker's part of a round: payloads in manifest order, and the samples behind them.

    slice, slices: of each tensor, if slices is not 0. whole: its payloads are those of whole tensors all the
    same, and hold outside of the slice what the worker had held back. weight: in the sum; None for its part
    of the samples.
    """

    samples: int
    payloads: Sequence[Payload]
    slice: int = 0
    slices: int = 0
    whole: bool = False
    weight: float | None = None


def mean(shares: Sequence[Share], weight: float, outs: Sequence[Float32]) -> None:
    """Times `weight`, into one array for each tensor: float32, shape (elements,)."""
    slices = max((share.slices for share in shares), default=0)
    if slices:
        for place, out in enumerate(outs):
            _of_slices(shares, slices, weight, place, out)
        return
    total = sum(share.samples for share in shares)
    weights = [(share.samples / total if share.weight is None else share.weight) * weight for share in shares]
    for place, out in enumerate(outs):
        reduce_payloads([share.payloads[place] for share in shares], weights, out)


def _of_slices(shares: Sequence[Share], slices: int, weight: float, place: int, out: Float32) -> None:
    """One tensor. What a worker had held back outside of its slice is added with the weight of its slice."""
    samples = [0] * slices
    for share in shares:
        samples[share.slice] += share.samples
    whole = {number: decode(share.payloads[place]) for number, share in enumerate(shares) if share.whole}
    for number in range(slices):
        start, end = share_of(out.size, number, slices)
        payloads: list[Payload] = []
        weights: list[float] = []
        for index, share in enumerate(shares):
            if share.slice != number and not share.whole:
                continue
            payloads.append(_cut(whole[index], start, end) if share.whole else share.payloads[place])
            weights.append(share.samples / samples[share.slice] * weight)
        reduce_payloads(payloads, weights, out[start:end])


def _cut(values: Float32, start: int, end: int) -> Payload:
    part = values[start:end]
    return DensePayload(format=DenseFormat.FLOAT32, elements=part.size, data=part.view(np.uint8))
