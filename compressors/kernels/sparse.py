"""Codings of a sparse payload's ascending indices, and sums at those indices.

GAPS: the gap of an index is its distance from the previous index, minus 1; the first index is its own gap.
    First come the low `low_bits` bits of each gap, packed, lowest bit first. Then, from a new byte on,
    comes the quotient gap >> low_bits of each gap in unary: that many zeros and a one, lowest bit of a byte
    first. Zeros pad both streams to whole bytes. This is Golomb-Rice coding with its two halves separated,
    so that each can be read without looking at the other. It can express ascending indices only.
BITMAP: one bit for each element, lowest bit first, padded with zeros.
SEEDED: no bytes. Index i lies in part i of `count` parts as equal as possible, at a place drawn by
    splitmix64.
UNIFORM: no bytes. The first `count` different elements that splitmix64 draws, each as likely as any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from ..payload import Bytes, Float32
from .checks import addresses, check
from .lazy import sparse_loops as loops
from .shared import LANES, Indices
from .threads import run


@lru_cache(1 << 14)
def gaps_low_bits(elements: int, count: int) -> int:
    """Return the `low_bits` with which the gaps of `count` indices at random places take the fewest bytes.

    With density p a gap exceeds g with probability (1 - p)**g. So the expected bits of one gap are low_bits +
    1 + q / (1 - q), where q = (1 - p)**(2**low_bits).
    """
    if not 0 < count < elements:
        return 0

    def expected_bits(low_bits: int) -> float:
        q = (1 - count / elements) ** (2**low_bits)
        return float(low_bits + 1 + q / (1 - q))

    return min(range(32), key=expected_bits)


def gaps_limit(elements: int, count: int, low_bits: int) -> int:
    """Return the most bytes that the valid gaps of `count` indices can take.

    The quotients gap >> low_bits sum up to less than elements / 2**low_bits.
    """
    return -(-count * low_bits // 8) + -(-(count + (elements >> low_bits)) // 8)


def encode_gaps(indices: Indices, elements: int, low_bits: int) -> Bytes:
    """Encode ascending indices below `elements` as gaps, and return the bytes.

    Raises ValueError if the indices do not ascend, or one is not below `elements`.
    """
    check("indices", indices, np.uint32, indices.size)
    found = np.zeros(1, np.int64)
    loops.sum_quotients(indices, elements, low_bits, found)
    quotients = int(found[0])
    if quotients < 0:
        raise ValueError(f"indices: expected ascending values below {elements}")
    low_bytes = -(-indices.size * low_bits // 8)
    unary_bytes = -(-(indices.size + quotients) // 8)
    data = np.zeros(low_bytes + unary_bytes, np.uint8)
    loops.write_gaps(indices, low_bits, data[:low_bytes], data[low_bytes:])
    return data


def decode_gaps(data: Bytes, elements: int, count: int, low_bits: int) -> Indices:
    """Decode `count` indices below `elements` from the bytes that `encode_gaps` returned, and return them.

    Raises ValueError for other bytes than `encode_gaps` returns for `count` such indices.
    """
    check("data", data, np.uint8, data.size)
    low_bytes = -(-count * low_bits // 8)
    if data.size < low_bytes:
        raise ValueError("fewer indices")
    indices, status = np.empty(count, np.uint32), np.zeros(2, np.int64)
    low, unary = data[:low_bytes], data[low_bytes:]
    loops.read_gaps(low, unary, low_bits, elements, loops.LOWEST_SET_BIT, indices, status)
    if status[0]:
        raise ValueError(loops.WRONG[status[0]])
    if status[1] != count:
        raise ValueError("fewer indices")
    return indices


def encode_bitmap(indices: Indices, elements: int) -> Bytes:
    """Encode ascending indices below `elements` as a bitmap of one bit for each element."""
    bits = np.zeros(elements, np.uint8)
    bits[indices] = 1
    return np.packbits(bits, bitorder="little")


def decode_bitmap(data: Bytes, elements: int, count: int) -> Indices:
    """Decode `count` indices from a bitmap of `elements` bits, as made by `encode_bitmap`, and return them.

    Raises ValueError if another number of bits is set, or the padding is not zero.
    """
    bits = np.unpackbits(data, bitorder="little")
    if np.count_nonzero(bits) != count:  # before their indices take memory
        raise ValueError("another number of indices")
    if bits[elements:].any():
        raise ValueError("nonzero padding")
    return np.flatnonzero(bits).astype(np.uint32)


def seeded_indices(seed: int, elements: int, count: int) -> Indices:
    """Return `count` ascending indices, one at a random place in each of `count` parts of the elements."""
    indices = np.empty(count, np.uint32)
    loops.draw(np.uint64(seed), elements, indices)
    return indices


def distinct_indices(seed: int, elements: int, count: int) -> Indices:
    """Return `count` ascending, distinct indices below `elements`, drawn uniformly."""
    indices, taken = np.empty(count, np.uint32), np.zeros(-(-elements // 64), np.uint64)
    loops.draw_distinct(np.uint64(seed), elements, taken, indices)
    return indices


def add_sparse(
    indices: Sequence[Indices],
    values: Sequence[Float32],
    weights: Float32,
    out: Float32,
    *,
    keep: bool = True,
) -> None:
    """Add `weights[w] * values[w]` to `out` at `indices[w]`, one payload after the other.

    Indices ascend, below `out.size`. keep: True to add to the values in `out`; False to start from zeros.
    """
    check("out", out, np.float32, out.size, written=True)
    check("weights", weights, np.float32, len(indices))
    for where, what in zip(indices, values, strict=True):
        check("indices", where, np.uint32, where.size)
        check("values", what, np.float32, where.size)
        if where.size and where[-1] >= out.size:
            raise ValueError(f"indices: expected ascending values below {out.size}, got {where[-1]}")
    counts = np.array([where.size for where in indices], np.int64)
    # Each index costs a cache line. With `keep` the other elements of `out` are not touched.
    work = LANES * int(counts.sum()) + (0 if keep else out.size)
    run(loops.sum_sparse, work, addresses(indices), addresses(values), counts, weights, out, keep)


def warm_up() -> None:
    """Compile every kernel of this module, or load it from the cache."""
    indices = np.array([1, 5], np.uint32)
    decode_gaps(encode_gaps(indices, 8, 1), 8, 2, 1)
    seeded_indices(1, 8, 2)
    distinct_indices(1, 8, 2)
    add_sparse([indices], [np.ones(2, np.float32)], np.ones(1, np.float32), np.zeros(8, np.float32))
