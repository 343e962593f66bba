"""Which elements a sparse payload holds: chosen coding, and back to indices."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from .kernels import sparse
from .payload import NO_BYTES, Bytes, IndexCoding, SparsePayload, ValuePayload

Indices = npt.NDArray[np.uint32]


def sparse_payload(elements: int, indices: Indices, values: ValuePayload) -> SparsePayload:
    """Of ascending indices and their values, with whichever coding of the indices is the smaller."""
    low_bits = sparse.gaps_low_bits(elements, indices.size)
    gaps = sparse.encode_gaps(indices, elements, low_bits)
    if gaps.size <= -(-elements // 8):
        return _joined(elements, IndexCoding.GAPS, gaps, values, low_bits=low_bits)
    return _joined(elements, IndexCoding.BITMAP, sparse.encode_bitmap(indices, elements), values)


def max_index_bytes(elements: int, count: int) -> int:
    """The most bytes that the indices of a `sparse_payload` take."""
    gaps = sparse.gaps_limit(elements, count, sparse.gaps_low_bits(elements, count))
    return min(gaps, -(-elements // 8))


def seeded_payload(
    elements: int, seed: int, values: ValuePayload, coding: IndexCoding = IndexCoding.SEEDED
) -> SparsePayload:
    """Of the values at `drawn_indices(coding, seed, elements, values.elements)`."""
    return _joined(elements, coding, NO_BYTES, values, seed=seed)


def drawn_indices(coding: IndexCoding, seed: int, elements: int, count: int) -> Indices:
    """Ascending. coding: SEEDED or UNIFORM."""
    draw = sparse.distinct_indices if coding is IndexCoding.UNIFORM else sparse.seeded_indices
    return draw(seed, elements, count)


def _joined(
    elements: int, coding: IndexCoding, indices: Bytes, values: ValuePayload, **parameter: int
) -> SparsePayload:
    """parameter: of the coding, `low_bits` or `seed`."""
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
    """Ascending, distinct and below `payload.elements`; raise `ValueError` for data that say otherwise."""
    data = payload.index_data()
    match payload.coding:
        case IndexCoding.GAPS:
            return sparse.decode_gaps(data, payload.elements, payload.count, payload.low_bits)
        case IndexCoding.BITMAP:
            return sparse.decode_bitmap(data, payload.elements, payload.count)
        case IndexCoding.SEEDED | IndexCoding.UNIFORM:
            return drawn_indices(payload.coding, payload.seed, payload.elements, payload.count)
