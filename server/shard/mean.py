"""The mean gradient of a round: over all samples, of whole tensors, of slices of them, or decoded.

Each share is weighted with its part of the samples, or with the weight that decodes a coded round. Where
tensors are cut into slices that goes for each slice by itself, over those who pushed it: a group of which one
member had nothing to push is missing in that slice alone. Terms are added in the order given.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ...compressors import DenseFormat, DensePayload, Payload, decode, reduce_payloads
from ...proto.shares import share
from ..job.events import Contribution

Float32 = npt.NDArray[np.float32]


Share = tuple[Contribution, Sequence[Payload]]  # the payloads in manifest order


def mean(shares: Sequence[Share], weight: float, outs: Sequence[Float32]) -> None:
    """Times `weight`, into one array for each tensor: float32, shape (elements,)."""
    slices = max((part.slices for part, _ in shares), default=0)
    if slices:
        for place, out in enumerate(outs):
            _of_slices(shares, slices, weight, place, out)
        return
    total = sum(part.samples for part, _ in shares)
    weights = [(part.samples / total if part.weight is None else part.weight) * weight for part, _ in shares]
    for place, out in enumerate(outs):
        reduce_payloads([payloads[place] for _, payloads in shares], weights, out)


def _of_slices(shares: Sequence[Share], slices: int, weight: float, place: int, out: Float32) -> None:
    """One tensor. What a worker had held back outside of its slice is added with the weight of its slice."""
    samples = [0] * slices
    for part, _ in shares:
        samples[part.slice] += part.samples
    whole = [decode(payloads[place]) if part.whole else None for part, payloads in shares]
    for number in range(slices):
        start, end = share(out.size, number, slices)
        payloads: list[Payload] = []
        weights: list[float] = []
        for (part, pushed), values in zip(shares, whole, strict=True):
            if part.slice == number or values is not None:
                payloads.append(pushed[place] if values is None else _cut(values, start, end))
                weights.append(part.samples / samples[part.slice] * weight)
        reduce_payloads(payloads, weights, out[start:end])


def _cut(values: Float32, start: int, end: int) -> Payload:
    part = values[start:end]
    return DensePayload(format=DenseFormat.FLOAT32, elements=part.size, data=part.view(np.uint8))
