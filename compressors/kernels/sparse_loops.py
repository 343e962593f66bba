# mypy: ignore-errors
# pyright: basic, reportCallIssue=false, reportAttributeAccessIssue=false
"""Kernels over the indices of sparse payloads, and the sum of many of them."""

from __future__ import annotations

import numpy as np
from numba import njit

from .compiling import fetch_add, kernel
from .dense import read_float32, read_uint32
from .lazy import CHUNK

# What is wrong with encoded gaps, by status[0].
WRONG = "", "more of them", "an index beyond the last element", "padding that is not zero"
TOO_MANY, OUT_OF_RANGE, PADDING = 1, 2, 3


# Of each byte.
LOWEST_SET_BIT = np.array([max((byte & -byte).bit_length() - 1, 0) for byte in range(256)], np.uint8)


@kernel
def sum_quotients(indices, elements, low_bits, found):
    """Of the gaps shifted right, to found[0]; -1 if the indices do not ascend below `elements`."""
    previous = np.int64(-1)
    for i in range(indices.size):
        gap = np.int64(indices[i]) - previous - 1
        previous = np.int64(indices[i])
        if gap < 0 or previous >= elements:
            found[0] = -1
            return
        found[0] += gap >> low_bits


@kernel
def write_gaps(indices, low_bits, low, unary):
    """`sparse_reference.encode_gaps` into zeroed bytes of the right sizes."""
    waiting, filled, at = np.uint64(0), np.uint64(0), 0
    width, mask = np.uint64(low_bits), np.int64((1 << low_bits) - 1)
    previous, position = np.int64(-1), np.int64(0)
    for i in range(indices.size):
        gap = np.int64(indices[i]) - previous - 1
        previous = np.int64(indices[i])
        waiting |= np.uint64(gap & mask) << filled
        filled += width
        while filled >= np.uint64(8):
            low[at] = np.uint8(waiting & np.uint64(255))
            waiting >>= np.uint64(8)
            filled -= np.uint64(8)
            at += 1
        position += gap >> low_bits
        unary[position >> 3] |= np.uint8(1 << (position & 7))
        position += 1
    if filled > np.uint64(0):
        low[at] = np.uint8(waiting)


@kernel
def read_gaps(low, unary, low_bits, elements, lowest_set_bit, indices, status):
    """`sparse_reference.decode_gaps` into `indices`. status: what is wrong, and how many it read."""
    waiting, filled, at = np.uint64(0), np.uint64(0), 0
    width, mask = np.uint64(low_bits), np.uint64((1 << low_bits) - 1)
    last, previous, count = np.int64(-1), np.int64(-1), 0
    for k in range(unary.size):
        byte = np.int64(unary[k])
        while byte:
            position = np.int64(8 * k + lowest_set_bit[byte])
            byte &= byte - 1
            if count == indices.size:
                status[0] = TOO_MANY
                return
            while filled < width:
                waiting |= np.uint64(low[at]) << filled
                filled += np.uint64(8)
                at += 1
            gap = ((position - previous - 1) << low_bits) + np.int64(waiting & mask)
            waiting >>= width
            filled -= width
            previous = position
            last += gap + 1
            if last >= elements:
                status[0] = OUT_OF_RANGE
                return
            indices[count] = last
            count += 1
    status[1] = count
    if waiting != np.uint64(0) or (unary.size > 0 and unary[unary.size - 1] == 0):
        status[0] = PADDING


@kernel
def draw(seed, elements, indices):
    """`sparse_reference.seeded_indices`."""
    # Unsigned, because elements times count may be anything below 2**64.
    count, first = np.uint64(indices.size), np.uint64(0)
    for i in range(indices.size):
        mixed = np.uint64(seed) + np.uint64(i + 1) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
        end = np.uint64(i + 1) * np.uint64(elements) // count
        indices[i] = first + mixed % (end - first)
        first = end


@kernel
def draw_distinct(seed, elements, taken, indices):
    """`sparse_reference.distinct_indices`. taken: 64-bit words of zeros, a bit for each element."""
    one, count = np.uint64(1), indices.size
    # What is drawn is what is left out where that is less.
    least = min(count, elements - count)
    drawn, number = 0, np.uint64(0)
    while drawn < least:
        number += one
        mixed = np.uint64(seed) + number * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        place = (mixed ^ (mixed >> np.uint64(31))) % np.uint64(elements)
        word, bit = np.int64(place >> np.uint64(6)), one << (place & np.uint64(63))
        if not taken[word] & bit:
            taken[word] |= bit
            drawn += 1
    at = 0
    for word in range(taken.size):
        left = ~taken[word] if least < count else taken[word]
        base = word * 64
        while left and at < count:  # beyond the last element nothing is asked for any more
            byte = left & np.uint64(255)
            if byte:
                indices[at] = base + LOWEST_SET_BIT[byte]
                at += 1
                left &= left - one
            else:
                left >>= np.uint64(8)
                base += 8


@njit
def _first_from(address, count, bound):
    """How many of the ascending indices are below `bound`."""
    low, high = np.int64(0), np.int64(count)
    while low < high:
        middle = (low + high) // 2
        if np.int64(read_uint32(address, middle)) < bound:
            low = middle + 1
        else:
            high = middle
    return low


@kernel
def sum_sparse(cursor, indices, values, counts, weights, out, keep):
    """Add payloads up, in their order, on top of `out` if `keep`, otherwise of zero.

    indices, values: uint64 (payloads,), where the uint32 and the float32 of each begin.
    """
    start = fetch_add(cursor, CHUNK)
    while start < out.size:
        stop = min(start + CHUNK, out.size)
        if not keep:
            out[start:stop] = np.float32(0.0)
        for w in range(counts.size):
            k = _first_from(indices[w], counts[w], start)
            while k < counts[w]:
                i = np.int64(read_uint32(indices[w], k))
                if i >= stop:
                    break
                out[i] += weights[w] * read_float32(values[w], k)
                k += 1
        start = fetch_add(cursor, CHUNK)
