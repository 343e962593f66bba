"""The indices of a sparse payload: choosing a coding, encoding and decoding."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from .kernels import sparse
from .payload import NO_BYTES, Bytes, IndexCoding, SparsePayload, ValuePayload

Indices = npt.NDArray[np.uint32]


def sparse_payload(elements: int, indices: Indices, values: ValuePayload) -> SparsePayload:
    """Return a sparse payload of ascending indices and their values, in the smaller of the two index codings.

    Args:
        indices: uint32, ascending and distinct.
        values: payload of the elements at these indices, in the same order.
    """
    low_bits = sparse.gaps_low_bits(elements, indices.size)
    gaps = sparse.encode_gaps(indices, elements, low_bits)
    if gaps.size <= -(-elements // 8):
        return _joined(elements, IndexCoding.GAPS, gaps, values, low_bits=low_bits)
    return _joined(elements, IndexCoding.BITMAP, sparse.encode_bitmap(indices, elements), values)


def max_index_bytes(elements: int, count: int) -> int:
    """Return the most bytes that the indices of a `sparse_payload` take."""
    gaps = sparse.gaps_limit(elements, count, sparse.gaps_low_bits(elements, count))
    return min(gaps, -(-elements // 8))


def seeded_payload(
    elements: int, seed: int, values: ValuePayload, coding: IndexCoding = IndexCoding.SEEDED
) -> SparsePayload:
    """Return a sparse payload whose indices the receiver draws from a seed.

    Args:
        seed: seed, below 2**64.
        values: payload of the elements at `drawn_indices(coding, seed, elements, values.elements)`.
        coding: SEEDED or UNIFORM.
    """
    return _joined(elements, coding, NO_BYTES, values, seed=seed)


def drawn_indices(coding: IndexCoding, seed: int, elements: int, count: int) -> Indices:
    """Return `count` ascending indices below `elements`, drawn from a seed. coding: SEEDED or UNIFORM."""
    draw = sparse.distinct_indices if coding is IndexCoding.UNIFORM else sparse.seeded_indices
    return draw(seed, elements, count)


def _joined(
    elements: int, coding: IndexCoding, indices: Bytes, values: ValuePayload, **parameter: int
) -> SparsePayload:
    return SparsePayload(
        elements=elements,
        count=values.elements,
        coding=coding,
        index_bytes=indices.size,
        values=replace(values, data=NO_BYTES),
        data=np.concatenate([indices, values.data]),
        **parameter,
    )


def decode_indices(payload: SparsePayload) -> Indices:
    """Return the indices of a sparse payload: uint32, ascending, distinct and below `payload.elements`.

    Raises:
        ValueError: the data do not encode such indices.
    """
    data = payload.index_data()
    match payload.coding:
        case IndexCoding.GAPS:
            return sparse.decode_gaps(data, payload.elements, payload.count, payload.low_bits)
        case IndexCoding.BITMAP:
            return sparse.decode_bitmap(data, payload.elements, payload.count)
        case IndexCoding.SEEDED | IndexCoding.UNIFORM:
            return drawn_indices(payload.coding, payload.seed, payload.elements, payload.count)
