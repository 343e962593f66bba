# mypy: ignore-errors
# pyright: basic, reportCallIssue=false, reportAttributeAccessIssue=false
"""Kernels over the indices of sparse payloads, and the sum of many such payloads."""

from __future__ import annotations

import numpy as np
from numba import njit

from .compiling import fetch_add, kernel
from .dense import read_float32, read_uint32
from .shared import CHUNK

# The fault of encoded gaps, by status[0]; the text follows "got".
WRONG = "", "more indices", "an index beyond the last element", "nonzero padding"
TOO_MANY, OUT_OF_RANGE, PADDING = 1, 2, 3


# Position of the lowest set bit of each byte; 0 for byte 0.
LOWEST_SET_BIT = np.array([max((byte & -byte).bit_length() - 1, 0) for byte in range(256)], np.uint8)


@kernel
def sum_quotients(indices, elements, low_bits, found):
    """Write the sum of all gap >> low_bits to found[0]; -1 if the indices do not ascend below `elements`."""
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
    """Encode ascending indices as gaps, as `sparse` says.

    Args:
        low: receives the low bits of all gaps; zeroed, of the right size.
        unary: receives the quotients in unary; zeroed, of the right size.
    """
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
    """Decode gaps as `sparse` says.

    Args:
        low, unary: bytes with the low bits of all gaps, and with the quotients in unary.
        indices: receives the indices; its size is the expected number.
        status: receives the fault, a place in `WRONG`, and the number of indices read.
    """
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
    """Draw one index in each of indices.size parts of the elements, as `sparse` says."""
    # Unsigned, because elements times count may be any number below 2**64.
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
    """Draw indices.size distinct indices, as `sparse` says.

    Args:
        taken: scratch memory, 64-bit words of zeros, with a bit for each element.
    """
    one, count = np.uint64(1), indices.size
    # If more than half of the elements are requested, draw the elements to leave out.
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
        while left and at < count:  # the limit keeps bits beyond the last element out
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
    """Return the number of the ascending indices that are below `bound`."""
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
    """Add weights[w] times the values of payload w to `out` at its indices, one payload after the other.

    Args:
        indices, values: address of each payload's uint32 indices and of its float32 values, uint64
            (payloads,).
        counts: number of each payload's indices.
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
