# mypy: ignore-errors
# pyright: basic, reportCallIssue=false, reportAttributeAccessIssue=false
"""Kernels that choose elements in many small blocks of one array, each block by itself.

A score is what is left of the bits of a float32 without its sign: such numbers are ordered as the magnitudes
are. The score at which a block's choice ends is found digit by digit, in three passes over the block, which
lies in the first-level cache.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from .compiling import fetch_add, kernel
from .dense import bits_of

DIGITS = ((20, 11), (10, 10), (0, 10))  # of a score: how far to shift it, and how many bits
BLOCKS = 16  # that a thread takes at a time


@njit(inline="always")
def _score(value, center):
    return bits_of(value - center) & np.uint32(0x7FFFFFFF)


@njit
def _count(values, center, least):
    count = 0
    for i in range(values.size):
        count += _score(values[i], center) >= least
    return count


@njit
def _last(values, center, least, keep, bins):
    """The score of rank `keep`, from 1, and how many are chosen of those that have it. At least so many
    reach `least`."""
    high, rank = np.uint32(0), keep
    for shift, bits in DIGITS:
        mask = np.uint32((1 << bits) - 1)
        bins[:] = 0
        for i in range(values.size):
            score = _score(values[i], center)
            if score >= least and score >> np.uint32(shift) >> np.uint32(bits) == high:
                bins[(score >> np.uint32(shift)) & mask] += 1
        digit = np.int64(mask)
        while bins[digit] < rank:
            rank -= bins[digit]
            digit -= 1
        high = np.uint32((high << np.uint32(bits)) | np.uint32(digit))
    return high, rank


@kernel
def choose(cursor, values, starts, keeps, lowest, centers, places, indices, chosen, counts):
    """`selection_reference.select_blocks`: what block b chooses goes to places[b] and on, counts[b] of it."""
    bins = np.empty(1 << 11, np.int32)
    first = fetch_add(cursor, BLOCKS)
    while first < keeps.size:
        for b in range(first, min(first + BLOCKS, keeps.size)):
            block, center = values[starts[b] : starts[b + 1]], centers[b]
            last = least = bits_of(lowest[b])
            among, equal = _count(block, center, least), block.size
            if among > keeps[b]:
                last, equal = np.uint32(0xFFFFFFFF), 0
                if keeps[b] > 0:
                    last, equal = _last(block, center, least, keeps[b], bins)
                among = keeps[b]
            at = places[b]
            end = at + among
            for i in range(block.size):
                if at == end:
                    break
                score = _score(block[i], center)
                if score < last:
                    continue
                if score == last:
                    if equal == 0:
                        continue
                    equal -= 1
                indices[at] = starts[b] + i
                chosen[at] = block[i]
                at += 1
            counts[b] = among
        first = fetch_add(cursor, BLOCKS)
