"""Results of the kernels over sparse payloads, defined in plain Python and numpy. `sparse` describes the
codings.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradwire.compressors.kernels.shared import Indices
from gradwire.compressors.payload import Bytes, Float32


def _packed(bits: list[int]) -> Bytes:
    """Return the bits packed into bytes, lowest bit first, padded with zeros to a whole byte."""
    return np.packbits(np.array(bits, np.uint8), bitorder="little")


def encode_gaps(indices: Indices, elements: int, low_bits: int) -> Bytes:
    """Encode ascending indices as gaps, index - previous index - 1, and return the bytes.

    The low `low_bits` bits of all gaps come first. Then, from a new byte on, come the quotients gap >>
    low_bits in unary: that many zeros and a one.
    """
    low: list[int] = []
    unary: list[int] = []
    previous = -1
    for index in indices.tolist():
        gap, previous = index - previous - 1, index
        low += [gap >> k & 1 for k in range(low_bits)]
        unary += [0] * (gap >> low_bits) + [1]
    return np.concatenate([_packed(low), _packed(unary)])


def decode_gaps(data: Bytes, elements: int, count: int, low_bits: int) -> Indices:
    """Decode `count` indices below `elements` from the bytes that `encode_gaps` returned, and return them.

    Raises:
        ValueError: the bytes are not those that `encode_gaps` returns for `count` such indices.
    """
    low_bytes = -(-count * low_bits // 8)
    low = np.unpackbits(data[:low_bytes], bitorder="little")
    ones = np.nonzero(np.unpackbits(data[low_bytes:], bitorder="little"))[0]
    if data.size < low_bytes or ones.size != count:
        raise ValueError("another number of indices")
    quotients = np.diff(ones, prepend=-1) - 1
    parts = low[: count * low_bits].reshape(count, low_bits).astype(np.int64)
    gaps = (quotients << low_bits) + (parts << np.arange(low_bits)).sum(axis=1)
    found = np.cumsum(gaps + 1) - 1
    if count and found[-1] >= elements:
        raise ValueError("an index beyond the last element")
    indices: Indices = found.astype(np.uint32)
    if not np.array_equal(encode_gaps(indices, elements, low_bits), data):
        raise ValueError("nonzero padding")
    return indices


def seeded_indices(seed: int, elements: int, count: int) -> Indices:
    """Return one index in each of `count` parts of the elements, as equal as possible, drawn by
    splitmix64.
    """
    found: list[int] = []
    for i in range(count):
        mixed = (seed + (i + 1) * 0x9E3779B97F4A7C15) % 2**64
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % 2**64
        mixed ^= mixed >> 31
        first, end = i * elements // count, (i + 1) * elements // count
        found.append(first + mixed % (end - first))
    return np.array(found, np.uint32)


def distinct_indices(seed: int, elements: int, count: int) -> Indices:
    """Return `count` ascending, distinct indices below `elements`, drawn by splitmix64.

    If `count` is more than half of the elements, the elements to leave out are drawn.
    """
    found: set[int] = set()
    least, number = min(count, elements - count), 0
    while len(found) < least:
        number += 1
        mixed = (seed + number * 0x9E3779B97F4A7C15) % 2**64
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % 2**64
        found.add((mixed ^ mixed >> 31) % elements)
    if least < count:
        found = {*range(elements)} - found
    return np.array(sorted(found), np.uint32)


def add_sparse(
    indices: Sequence[Indices],
    values: Sequence[Float32],
    weights: Float32,
    out: Float32,
    *,
    keep: bool = True,
) -> None:
    """Add `weights[w] * values[w]` to `out` at `indices[w]`, one payload after the other.

    Args:
        keep: True to add to the values in `out`; False to start from zeros.
    """
    if not keep:
        out[:] = 0.0
    for where, what, weight in zip(indices, values, weights, strict=True):
        out[where] += weight * what
