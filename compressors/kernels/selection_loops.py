# mypy: ignore-errors
# pyright: basic, reportCallIssue=false, reportAttributeAccessIssue=false
"""Kernels that look for elements: one pass over memory that writes down which they are, and their values.

A thread writes those of a chunk into a buffer of its own, which stays in the cache, and then copies them to a
place that it reserves in the common output. Where that is full, nothing more is copied, only counted.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from . import vectors as v
from .compiling import copy, fetch_add, kernel
from .dense import bits_of
from .lazy import BINS, CHUNK, LANES

MAGNITUDE, LARGEST, SMALLEST = range(3)
AHEAD = 4096


@njit
def _score(values, score, center):
    if score == MAGNITUDE:
        return v.magnitude(v.subtract(values, center))
    if score == SMALLEST:
        return v.subtract(v.all_floats(np.float32(0.0)), values)
    return values


@njit
def _hand_over(indices, values, count, start, stop, found, found_values, places, total):
    """Copy what the chunk from `start` to `stop` gave to the common output, if there is room.

    places: int64 (chunks, 2), of each chunk where it begins there and how many it has.
    """
    while count > 0 and indices[count - 1] >= stop:  # what the padding gave
        count -= 1
    chunk, at = start // CHUNK, fetch_add(total, count)
    places[chunk, 0], places[chunk, 1] = at, count
    if at + count <= found.size:
        copy(indices, 0, count, found, at)
        copy(values, 0, count, found_values, at)


@kernel
def collect(cursor, values, score, center, lowest, beyond, found, found_values, places, total):
    """The elements whose score is at least `lowest` and not at least `beyond`, which may be NaN.

    found: uint32; found_values: float32; places: see `_hand_over`; total: int64 (1,), of all that there are.
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
    """left = residual + gradient, saturating; and `collect` by magnitude of what it then holds.

    left: may be `residual`. stream: write it past the cache; only if it starts at a multiple of 64 bytes.
    odd: int64 (1,), more than 0 afterwards if the gradient is not finite.
    """
    one, other, lows = np.uint64(gradient.ctypes.data), np.uint64(residual.ctypes.data), v.all_floats(lowest)
    zeros = v.all_floats(np.float32(0.0))  # until there is a NaN
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
    if score == MAGNITUDE:
        return abs(np.float32(value - center))
    if score == SMALLEST:
        return -value
    return value


@kernel
def keep_best(scores, threshold, ties, places, found, values, kept, kept_values):
    """Those found whose score is above `threshold`, and the first `ties` of those that reach it just so.

    found, values, places: what `collect` wrote; its chunks are taken in order. kept, kept_values: 16 longer
    than there are any to keep, because that many are written at once.
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
            # A tie among the next sixteen, or fewer than sixteen.
            for k in range(i, min(i + LANES, end)):
                tie = scores[k] == threshold and ties > 0
                kept[at], kept_values[at] = found[k], values[k]
                at += np.int64(scores[k] > threshold) + np.int64(tie)
                ties -= np.int64(tie)
            i = min(i + LANES, end)


@kernel
def put(cursor, out, indices, values):
    """out[indices] = values; the indices are distinct."""
    start = fetch_add(cursor, CHUNK // 16)
    while start < indices.size:
        for i in range(start, min(start + CHUNK // 16, indices.size)):
            out[np.int64(indices[i])] = values[i]
        start = fetch_add(cursor, CHUNK // 16)


@kernel
def histogram(cursor, values, score, center, counts):
    """How many scores have each upper half of their ordered bits; added to counts (int64, shape (BINS,))."""
    own = np.zeros(BINS, np.int64)
    start = fetch_add(cursor, CHUNK)
    while start < values.size:
        for i in range(start, min(start + CHUNK, values.size)):
            value = _score_of_one(values[i], score, center)
            bits = bits_of(np.float32(value + np.float32(0.0)))  # no negative zero
            flip = np.uint32(0xFFFFFFFF) if bits >> np.uint32(31) else np.uint32(0x80000000)
            own[np.uint32(bits ^ flip) >> np.uint32(16)] += 1
        start = fetch_add(cursor, CHUNK)
    for k in range(BINS):
        if own[k]:
            fetch_add(counts[k : k + 1], own[k])
