# mypy: ignore-errors
# pyright: basic, reportCallIssue=false, reportAttributeAccessIssue=false
"""Kernels that search for elements: one pass over memory that writes the indices and values of those it
finds.

Each thread writes the elements of a chunk to a buffer of its own, which stays in the cache. Then it reserves
a range of the common output and copies them there. If the output is full, the thread only counts them.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from . import vectors as v
from .compiling import copy, fetch_add, kernel
from .dense import bits_of
from .shared import BINS, CHUNK, LANES

MAGNITUDE, LARGEST, SMALLEST = range(3)
AHEAD = 4096


@njit
def _score(values, score, center):
    """Return the scores of sixteen values."""
    if score == MAGNITUDE:
        return v.magnitude(v.subtract(values, center))
    if score == SMALLEST:
        return v.subtract(v.all_floats(np.float32(0.0)), values)
    return values


@njit
def _hand_over(indices, values, count, start, stop, found, found_values, places, total):
    """Copy the elements found in the chunk that begins at `start` to the common output, if they fit.

    Args:
        count: number of elements found, including padding elements at the end, which are dropped.
        stop: end of the chunk; indices from here on belong to the padding.
        places: receives for each chunk its position in the output and its number of elements, int64 (chunks,
            2).
        total: number of elements found by all threads so far, int64 (1,).
    """
    while count > 0 and indices[count - 1] >= stop:  # elements of the padding
        count -= 1
    chunk, at = start // CHUNK, fetch_add(total, count)
    places[chunk, 0], places[chunk, 1] = at, count
    if at + count <= found.size:
        copy(indices, 0, count, found, at)
        copy(values, 0, count, found_values, at)


@kernel
def collect(cursor, values, score, center, lowest, beyond, found, found_values, places, total):
    """Write the indices and values of the elements whose score is at least `lowest` and below `beyond`.

    Args:
        beyond: upper bound; NaN for none.
        found, found_values: receive indices (uint32) and values (float32), as far as they fit.
        places: receives each chunk's position in `found` and its number of elements, int64 (chunks, 2).
        total: receives the number of all such elements, int64 (1,).
    """
    address, centers = np.uint64(values.ctypes.data), v.all_floats(center)
    lows, highs = v.all_floats(lowest), v.all_floats(beyond)
    indices, taken = np.empty(CHUNK + LANES, np.uint32), np.empty(CHUNK + LANES, np.float32)
    padded = np.empty(LANES, np.float32)
    start = fetch_add(cursor, CHUNK)
    while start < values.size:
        stop, at = min(start + CHUNK, values.size), 0
        whole = start + (stop - start) // LANES * LANES
        for i in range(start, whole, LANES):
            v.prefetch(address, np.uint64(4 * i + AHEAD))
            here = v.load(values, i)
            scored = _score(here, score, centers)
            chosen = v.and_not(v.at_least(scored, lows), v.at_least(scored, highs))
            at += v.store_chosen(indices, taken, at, v.words_from(i), here, chosen)
        rest = stop - whole
        if rest > 0:
            padded[:] = values[whole]
            copy(values, whole, stop, padded)
            here = v.load(padded, 0)
            scored = _score(here, score, centers)
            chosen = v.and_not(v.at_least(scored, lows), v.at_least(scored, highs))
            at += v.store_chosen(indices, taken, at, v.words_from(whole), here, chosen)
        _hand_over(indices, taken, at, start, stop, found, found_values, places, total)
        start = fetch_add(cursor, CHUNK)


@kernel
def add_and_collect(
    cursor, gradient, residual, left, stream, lowest, found, found_values, places, total, odd
):
    """Write the saturating sum residual + gradient to `left`, and collect its elements of magnitude `lowest`
    or more.

    Args:
        left: receives the sum; it may be `residual` itself.
        stream: True to write `left` past the cache; it must then begin at a multiple of 64 bytes.
        found, found_values, places, total: as for `collect`.
        odd: int64 (1,), greater than 0 afterwards if the gradient is not finite.
    """
    one, other, lows = np.uint64(gradient.ctypes.data), np.uint64(residual.ctypes.data), v.all_floats(lowest)
    zeros = v.all_floats(np.float32(0.0))  # x - x of every element: 0 if x is finite, otherwise NaN
    indices, taken = np.empty(CHUNK + LANES, np.uint32), np.empty(CHUNK + LANES, np.float32)
    padded = np.zeros((2, LANES), np.float32)
    start = fetch_add(cursor, CHUNK)
    while start < gradient.size:
        stop, at = min(start + CHUNK, gradient.size), 0
        whole = start + (stop - start) // LANES * LANES
        for i in range(start, whole, LANES):
            v.prefetch(one, np.uint64(4 * i + AHEAD))
            v.prefetch(other, np.uint64(4 * i + AHEAD))
            given = v.load(gradient, i)
            zeros = v.add(zeros, v.subtract(given, given))
            summed = v.saturated_sum(given, v.load(residual, i))
            if stream:
                v.stream(left, i, summed)
            else:
                v.store(left, i, summed)
            chosen = v.at_least(v.magnitude(summed), lows)
            at += v.store_chosen(indices, taken, at, v.words_from(i), summed, chosen)
        rest = stop - whole
        if rest > 0:
            copy(gradient, whole, stop, padded[0])
            copy(residual, whole, stop, padded[1])
            given = v.load(padded[0], 0)
            zeros = v.add(zeros, v.subtract(given, given))
            summed = v.saturated_sum(given, v.load(padded[1], 0))
            v.store(padded[1], 0, summed)
            copy(padded[1], 0, rest, left, whole)
            chosen = v.at_least(v.magnitude(summed), lows)
            at += v.store_chosen(indices, taken, at, v.words_from(whole), summed, chosen)
        _hand_over(indices, taken, at, start, stop, found, found_values, places, total)
        start = fetch_add(cursor, CHUNK)
    if stream:
        v.fence()
    if v.any_lane(v.nonzero(zeros)):
        fetch_add(odd, 1)


@njit
def _score_of_one(value, score, center):
    """Return the score of one value."""
    if score == MAGNITUDE:
        return abs(np.float32(value - center))
    if score == SMALLEST:
        return -value
    return value


@kernel
def keep_best(scores, threshold, ties, places, found, values, kept, kept_values):
    """Write the found elements whose score is above `threshold`, and the first `ties` of those that equal it.

    Args:
        found, values, places: output of `collect`; its chunks are read in ascending order.
        kept, kept_values: receive indices and values; 16 longer than the number to keep, because each store
            writes 16.
    """
    address, limits, at = np.uint64(found.ctypes.data), v.all_floats(threshold), 0
    for chunk in range(places.shape[0]):
        i, end = places[chunk, 0], places[chunk, 0] + places[chunk, 1]
        while i < end:
            if i + LANES <= end:
                scored = v.load(scores, i)
                higher = v.above(scored, limits)
                if not v.any_lane(v.and_not(v.at_least(scored, limits), higher)):
                    words = v.load_words(address, np.uint64(4 * i))
                    at += v.store_chosen(kept, kept_values, at, words, v.load(values, i), higher)
                    i += LANES
                    continue
            # Here the next sixteen hold a tie, or fewer than sixteen are left: take them one by one.
            for k in range(i, min(i + LANES, end)):
                tie = scores[k] == threshold and ties > 0
                kept[at], kept_values[at] = found[k], values[k]
                at += np.int64(scores[k] > threshold) + np.int64(tie)
                ties -= np.int64(tie)
            i = min(i + LANES, end)


@kernel
def put(cursor, out, indices, values):
    """Assign values[k] to out[indices[k]] for every k; the indices are distinct."""
    start = fetch_add(cursor, CHUNK // 16)
    while start < indices.size:
        for i in range(start, min(start + CHUNK // 16, indices.size)):
            out[np.int64(indices[i])] = values[i]
        start = fetch_add(cursor, CHUNK // 16)


@kernel
def histogram(cursor, values, score, center, counts):
    """Count the scores by the upper half of their bits.

    Args:
        counts: the counts are added to it, int64 (BINS,), in ascending order of scores.
    """
    own = np.zeros(BINS, np.int64)
    start = fetch_add(cursor, CHUNK)
    while start < values.size:
        for i in range(start, min(start + CHUNK, values.size)):
            value = _score_of_one(values[i], score, center)
            bits = bits_of(np.float32(value + np.float32(0.0)))  # adding 0 turns -0 into +0
            flip = np.uint32(0xFFFFFFFF) if bits >> np.uint32(31) else np.uint32(0x80000000)
            own[np.uint32(bits ^ flip) >> np.uint32(16)] += 1
        start = fetch_add(cursor, CHUNK)
    for k in range(BINS):
        if own[k]:
            fetch_add(counts[k : k + 1], own[k])
