# mypy: ignore-errors
# pyright: basic, reportCallIssue=false, reportAttributeAccessIssue=false
"""Kernels that select elements in many small blocks of one array, each block on its own.

The score of an element is the bit pattern of x - center without its sign; such integers are ordered as the
magnitudes are. The lowest selected score of a block is found digit by digit, in three passes over the block,
which stays in the first-level cache.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from .compiling import fetch_add, kernel
from .dense import bits_of

DIGITS = ((20, 11), (10, 10), (0, 10))  # shift and width in bits of each digit of a score, highest first
BLOCKS = 16  # blocks that a thread claims at a time


@njit(inline="always")
def _score(value, center):
    """Return the magnitude of value - center as the bits of a float32."""
    return bits_of(value - center) & np.uint32(0x7FFFFFFF)


@njit
def _count(values, center, least):
    """Return the number of values whose score is at least `least`."""
    count = 0
    for i in range(values.size):
        count += _score(values[i], center) >= least
    return count


@njit
def _last(values, center, least, keep, bins):
    """Find the lowest score that is selected, and how many elements with exactly this score are.

    Args:
        least: lowest score that counts; at least `keep` values reach it.
        keep: number of values to select, at least 1.
        bins: scratch memory, int32 (2048,).

    Returns:
        The score of rank `keep`, counted from 1 for the highest, and the number of values with this score to
            select.
    """
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
    """Select elements of each block, as `block_selection.select_blocks` says.

    Args:
        starts: index of each block's first element, and the end of the last, int64 (blocks + 1,).
        places: position in `indices` and `chosen` at which each block's selection begins.
        indices, chosen: receive the selected elements' indices and values, with gaps after blocks that select
            fewer than `keeps`.
        counts: receives the number of elements selected in each block.
    """
    bins = np.empty(1 << 11, np.int32)
    first = fetch_add(cursor, BLOCKS)
    while first < keeps.size:
        for b in range(first, min(first + BLOCKS, keeps.size)):
            block, center = values[starts[b] : starts[b + 1]], centers[b]
            # Case 1: at most keeps[b] elements reach `lowest`. Take them all.
            last = least = bits_of(lowest[b])
            among, equal = _count(block, center, least), block.size
            if among > keeps[b]:
                # Case 2: nothing is to be selected. No score reaches this bound.
                last, equal = np.uint32(0xFFFFFFFF), 0
                # Case 3: more elements reach `lowest` than are to be selected. Find the score of the last
                # one.
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
