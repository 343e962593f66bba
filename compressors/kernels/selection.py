"""Exact selection at about the speed of one pass over memory.

A selection by sorting, or by partitioning as `torch.topk` and `np.argpartition` do, touches every element
many times. Here one pass writes down the few whose score is at least a guess, and only those are looked at
again. The guess is the last step's threshold, a little lowered, or comes from a sample. If it was too high,
or by far too low, a histogram of the upper halves of the scores' bits says where the threshold lies, and a
second pass collects from there on. So the result is exact whatever the guess; only the time depends on it.

Of equal scores the lower index is taken, and -0 equals 0. Inputs are finite.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..payload import Float32
from . import selecting as loops
from .compiling import CHUNK
from .cpu import _check  # pyright: ignore[reportPrivateUsage]
from .selection_reference import Indices, Score, Selection
from .threads import run

__all__ = ["Score", "Selection", "add_and_select", "at_least", "median", "select", "warm_up"]

# Below this, everything is a candidate.
SMALL = 1 << 14
# A sample takes this many neighbours from each so many elements.
RUN, STRIDE = 16, 1 << 12
# How far below the last threshold the next is looked for.
LOWERED = 0.95
# With more candidates than this many times what is kept, finding a better guess is the shorter way.
MOST_CANDIDATES = 4


class _Candidates(NamedTuple):
    """Ascending indices of some elements, and their scores."""

    indices: Indices
    scores: Float32


def select(
    values: Float32,
    keep: int,
    *,
    score: Score = Score.MAGNITUDE,
    center: float = 0.0,
    guess: float | None = None,
) -> Selection:
    """The `keep` elements of highest score. guess: the threshold of a similar selection."""
    _check("values", values, np.float32, values.size)
    _check_keep(keep, values.size)

    lowest = _first_guess(values, keep, score, center, guess)
    candidates = _collect(values, score, center, lowest, room=_room(keep, values.size))
    if candidates is None or candidates.indices.size < keep:
        place, _ = _reached(_histogram(values, score, center), keep)
        candidates = _collect(values, score, center, _edge(place), room=values.size)
        assert candidates is not None
    return _highest(candidates, keep)


def add_and_select(
    gradient: Float32, residual: Float32, keep: int, *, guess: float | None = None
) -> Selection:
    """Leave the saturating sum of both in `residual`, in place, and select from it by magnitude."""
    _check("gradient", gradient, np.float32, gradient.size)
    _check("residual", residual, np.float32, gradient.size, written=True)
    _check_keep(keep, gradient.size)
    # The first step adds up without looking for anything.
    lowest = guess * LOWERED if guess is not None and guess > 0 else np.inf
    arguments = gradient, residual, np.float32(lowest)
    room = _room(keep, gradient.size)
    candidates = _collected(loops.add_and_collect, gradient.size, room, *arguments)
    if candidates is None or candidates.indices.size < keep:
        return select(residual, keep)
    return _highest(candidates, keep)


def median(values: Float32) -> float:
    """The element in the middle of the sorted order; of an even number the lower of two."""
    if not values.size:
        raise ValueError("values: expected at least one element")
    _check("values", values, np.float32, values.size)
    above = values.size - (values.size - 1) // 2  # how many are at least as large as it
    if values.size > SMALL:
        # The element lies in the bin at which the number of those from the top reaches that many.
        place, over = _reached(_histogram(values, Score.LARGEST, 0.0), above)
        edges = _edge(place), _edge(place + 1)
        inside = _collect(values, Score.LARGEST, 0.0, *edges, room=values.size)
        assert inside is not None
        values, above = inside.scores, above - over
    return _lowest_of_highest(values, above) + 0.0  # no negative zero


def at_least(values: Float32, threshold: float) -> Indices:
    """Where |x| is `threshold` or more, ascending."""
    _check("values", values, np.float32, values.size)
    found = _collect(values, Score.MAGNITUDE, 0.0, threshold, room=values.size)
    assert found is not None
    return found.indices


def warm_up() -> None:
    """Compile every kernel, or load it from the cache."""
    values = np.linspace(-1, 1, SMALL + 17, dtype=np.float32)
    select(values, 5, guess=np.inf)
    add_and_select(values, np.zeros_like(values), 5, guess=0.5)
    median(values)


def _check_keep(keep: int, elements: int) -> None:
    if not 0 <= keep <= elements:
        raise ValueError(f"keep: expected 0 to {elements}, got {keep}")


def _first_guess(values: Float32, keep: int, score: Score, center: float, guess: float | None) -> float:
    """A score that somewhat more than `keep` elements should reach."""
    if keep == 0:
        return np.inf
    if values.size <= SMALL:
        return -np.inf
    if guess is not None and guess > 0 and score is Score.MAGNITUDE:
        return guess * LOWERED
    rows = values[: values.size // STRIDE * STRIDE].reshape(-1, STRIDE)
    sample = score.of(rows[:, :RUN].reshape(-1), center)
    expected = sample.size * keep / values.size
    place = (
        int(expected + 4 * expected**0.5) + RUN
    )  # a few standard deviations more, and neighbours are alike
    return _lowest_of_highest(sample, place) if place < sample.size else -np.inf


def _room(keep: int, elements: int) -> int:
    """Candidates to make room for."""
    return min(elements, max(MOST_CANDIDATES * keep, SMALL))


def _edge(place: int) -> float:
    """The lowest float whose ordered bits have this upper half; see `_histogram`."""
    bits = (place << 16) ^ (0x80000000 if place >= loops.BINS // 2 else 0xFFFFFFFF)
    return float(np.array([bits], np.uint32).view(np.float32)[0])


def _histogram(values: Float32, score: Score, center: float) -> npt.NDArray[np.int64]:
    """How many scores have each upper half of their bits, these ordered as the scores are."""
    counts = np.zeros(loops.BINS, np.int64)
    run(loops.histogram, values.size, values, score.value, np.float32(center), counts)
    return counts


def _reached(counts: npt.NDArray[np.int64], rank: int) -> tuple[int, int]:
    """The bin with the element of this rank, from 1 for the highest score; how many are in higher bins."""
    from_top = np.cumsum(counts[::-1])
    steps = int(np.searchsorted(from_top, rank))
    return loops.BINS - 1 - steps, int(from_top[steps - 1]) if steps else 0


def _collect(
    values: Float32, score: Score, center: float, lowest: float, beyond: float = np.nan, *, room: int
) -> _Candidates | None:
    """Where the score is at least `lowest`, and below `beyond` if that is a number. None: over `room`."""
    if lowest == -np.inf:
        return _Candidates(np.arange(values.size, dtype=np.uint32), score.of(values, center))
    limits = np.float32(center), np.float32(lowest), np.float32(beyond)
    return _collected(loops.collect, values.size, room, values, score.value, *limits)


def _collected(
    kernel: Callable[..., None], elements: int, room: int, *arguments: object
) -> _Candidates | None:
    """Run a kernel that writes down what it finds, and put the chunks' parts in order. None: over `room`."""
    found, scores = np.empty(room, np.uint32), np.empty(room, np.float32)
    places, total = np.zeros((-(-elements // CHUNK), 2), np.int64), np.zeros(1, np.int64)
    run(kernel, elements, *arguments, found, scores, places, total)
    if total[0] > room:
        return None
    parts = [slice(at, at + count) for at, count in places.tolist()]
    if not parts:
        return _Candidates(found[:0], scores[:0])
    return _Candidates(np.concatenate([found[p] for p in parts]), np.concatenate([scores[p] for p in parts]))


def _highest(candidates: _Candidates, keep: int) -> Selection:
    """The `keep` best of the candidates, which all elements of higher or equal score are among."""
    indices, scores = candidates
    if keep == 0:
        return Selection(indices[:0], 0.0)
    threshold = _lowest_of_highest(scores, keep)
    chosen = scores >= threshold
    surplus = int(np.count_nonzero(chosen)) - keep
    if surplus:
        chosen[np.flatnonzero(scores == threshold)[-surplus:]] = False
    return Selection(indices[chosen], threshold)


def _lowest_of_highest(scores: Float32, number: int) -> float:
    """The lowest of the so many highest scores, at least one."""
    place = scores.size - number
    return float(np.partition(scores, place)[place])
