"""Exact selection of the largest elements, at about the speed of one pass over memory.

Selection by sorting, or by partitioning as `torch.topk` and `np.argpartition` do, touches every element many
times. Here one pass writes down the few elements whose score reaches a guessed threshold, and only those are
examined again. The guess is taken from a sample. If it was too high, or far too low, a histogram of the upper
halves of the scores' bits gives the threshold, and one more pass collects from there. So the result is exact
for any sample; only the time depends on it.

The previous step's threshold would be a worse guess: with error feedback it changes, by half in the first
steps. The sample costs a twentieth of the pass and never lags behind.

Of equal scores the lower index is selected, and -0 equals 0. Inputs are finite. By magnitude, zeros are never
selected: if fewer elements than requested differ from zero, those are the selection.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..payload import Float32
from .checks import address, check, check_keep
from .cpu import STREAM_ELEMENTS
from .lazy import selection_loops as loops
from .shared import BINS, CHUNK, LANES, Indices, Score, Selection, add_saturating
from .threads import Scratch, run

# With at most this many elements, all of them are candidates.
SMALL = 1 << 14
# A sample takes the first RUN of every STRIDE elements.
RUN, STRIDE = 16, 1 << 12
# Elements, of 8 bytes each, that a thread's scratch memory has room for at most.
LARGEST_SCRATCH = 1 << 22
# The smallest magnitude of an element that is not zero.
LEAST = float(np.nextafter(np.float32(0), np.float32(1)))
# With more candidates than this many times the number to select, finding a better threshold is faster.
MOST_CANDIDATES = 4


class _Candidates(NamedTuple):
    """The elements that one pass over memory has written down.

    Attributes:
        indices: indices of the elements, uint32, chunk by chunk; the order of the chunks depends on the
            threads.
        values: their values, float32. Both may lie in the thread's `Scratch`, which its next pass overwrites.
        places: position and number of elements of each chunk in `indices`, int64 (chunks, 2).
    """

    indices: Indices
    values: Float32
    places: npt.NDArray[np.int64]

    def in_order(self) -> Selection:
        """Return the candidates in ascending order of their indices, in new memory."""
        parts = [slice(at, at + count) for at, count in self.places.tolist()] or [slice(0)]
        return Selection(
            np.concatenate([self.indices[p] for p in parts]), np.concatenate([self.values[p] for p in parts])
        )


_scratch = Scratch(LARGEST_SCRATCH)


def select(values: Float32, keep: int, *, score: Score = Score.MAGNITUDE, center: float = 0.0) -> Selection:
    """Return the `keep` elements of highest score; by magnitude, only those that are not zero.

    center: number that MAGNITUDE subtracts from each element first.
    """
    check("values", values, np.float32, values.size)
    check_keep(keep, values.size)

    floor = -np.inf if values.size <= SMALL or not score.excludes_zeros(center) else LEAST
    lowest = max(floor, _guess(sample(values), values.size, keep, score, center))
    candidates = _collect(values, score, center, lowest, room=_room(keep, values.size))
    if candidates is None or (candidates.indices.size < keep and lowest > floor):
        counts = _histogram(values, score, center)
        place, above = _reached(counts, keep)
        lowest = max(floor, _edge(place))
        candidates = _collect(values, score, center, lowest, room=above + int(counts[place]))
        assert candidates is not None
    return _best(candidates, keep, score, center)


def add_and_select(gradient: Float32, residual: Float32, keep: int, left: Float32 | None = None) -> Selection:
    """Write the saturating sum gradient + residual to `left`, and return its `keep` elements of largest
    magnitude.

    A `left` of None stands for `residual`. Raises FloatingPointError if the gradient is not finite; the
    contents of `left` are then undefined.
    """
    left = residual if left is None else left
    check("gradient", gradient, np.float32, gradient.size)
    check("residual", residual, np.float32, gradient.size)
    check("left", left, np.float32, gradient.size, written=True)
    check_keep(keep, gradient.size)

    few = add_saturating(sample(gradient), sample(residual))
    lowest = max(LEAST, _guess(few, gradient.size, keep, Score.MAGNITUDE, 0.0))
    candidates = _add_and_collect(gradient, residual, left, lowest, room=_room(keep, gradient.size))
    if candidates is None or (candidates.indices.size < keep and lowest > LEAST):
        return select(left, keep)
    return _best(candidates, keep, Score.MAGNITUDE, 0.0)


def add_to(residual: Float32, gradient: Float32) -> None:
    """Add `gradient` to `residual` in place, as `add_into` does."""
    add_into(gradient, residual, residual)


def add_into(gradient: Float32, residual: Float32, left: Float32) -> None:
    """Write the saturating sum gradient + residual to `left`; raise FloatingPointError if the gradient is not
    finite."""
    check("gradient", gradient, np.float32, gradient.size)
    check("residual", residual, np.float32, gradient.size)
    check("left", left, np.float32, gradient.size, written=True)
    _add_and_collect(gradient, residual, left, np.inf, room=0)


def median(values: Float32) -> float:
    """Return the median; of an even number of elements, the lower of the middle two. Raises ValueError if
    there is none."""
    if not values.size:
        raise ValueError("values: expected at least one element, got none")
    check("values", values, np.float32, values.size)
    rank = values.size - (values.size - 1) // 2  # rank of the median, 1 for the largest element
    if values.size > SMALL:
        # Only the elements of the median's bin are examined further; `above` elements are in higher bins.
        counts = _histogram(values, Score.LARGEST, 0.0)
        place, above = _reached(counts, rank)
        edges = _edge(place), _edge(place + 1)
        inside = _collect(values, Score.LARGEST, 0.0, *edges, room=int(counts[place]))
        assert inside is not None
        values, rank = inside.values, rank - above
    return _lowest_of_highest(values.copy(), rank) + 0.0  # adding 0 turns -0 into +0


def at_least(values: Float32, threshold: float) -> Selection:
    """Return all elements with |x| of `threshold` or more."""
    check("values", values, np.float32, values.size)
    few = sample(values)
    seen = int(np.count_nonzero(np.abs(few) >= np.float32(threshold)))
    expected = seen * values.size // max(1, few.size)
    found = _collect(values, Score.MAGNITUDE, 0.0, threshold, room=_room(expected, values.size) // 2)
    if found is None:
        found = _collect(values, Score.MAGNITUDE, 0.0, threshold, room=values.size)
        assert found is not None
    return found.in_order()


def put(out: Float32, indices: Indices, values: Float32) -> None:
    """Assign `values` to the elements of `out` at `indices`, which are ascending and distinct.

    Raises:
        ValueError: an index is not below `out.size`.
    """
    check("out", out, np.float32, out.size, written=True)
    check("indices", indices, np.uint32, indices.size)
    check("values", values, np.float32, indices.size)
    if indices.size and int(indices.max()) >= out.size:
        raise ValueError(f"indices: expected ascending values below {out.size}, got {indices.max()}")
    run(loops.put, LANES * indices.size, out, indices, values)  # each index costs a cache line


def sample(values: Float32) -> Float32:
    """Return a sample of the values: the first 16 of every 4096; all values if there are at most `SMALL`."""
    if values.size <= SMALL:
        return values
    return values[: values.size // STRIDE * STRIDE].reshape(-1, STRIDE)[:, :RUN].reshape(-1)


def warm_up() -> None:
    """Compile every kernel of this module, or load it from the cache."""
    values = np.linspace(-1, 1, SMALL + 17, dtype=np.float32)
    select(values, 5)
    select(values * np.float32(0), 5)  # zeros: this selection needs the histogram
    found = add_and_select(values, np.zeros_like(values), 5)
    add_and_select(values, values.copy(), 5, np.zeros_like(values))
    put(values, found.indices, found.values)
    median(values)


def _guess(few: Float32, elements: int, keep: int, score: Score, center: float) -> float:
    """Estimate a threshold: a score that somewhat more than `keep` of `elements` elements reach.

    few: a sample of the elements.
    """
    if keep == 0:
        return np.inf
    if elements <= SMALL:
        return -np.inf
    expected = few.size * keep / elements
    # Three standard deviations more than expected. Neighbours resemble each other, so a run counts as one
    # draw.
    place = int(expected + 3 * (expected * RUN) ** 0.5) + RUN
    return _lowest_of_highest(score.of(few, center), place) if place < few.size else -np.inf


def _room(keep: int, elements: int) -> int:
    return min(elements, max(MOST_CANDIDATES * keep, SMALL))


def _edge(place: int) -> float:
    """Return the lowest score of a bin of `_histogram`. place: number of the bin, the upper 16 bits of its
    scores in their ordered form."""
    bits = (place << 16) ^ (0x80000000 if place >= BINS // 2 else 0xFFFFFFFF)
    return float(np.array([bits], np.uint32).view(np.float32)[0])


def _histogram(values: Float32, score: Score, center: float) -> npt.NDArray[np.int64]:
    """Return the number of scores in each bin, ascending, int64 of shape (BINS,). A bin holds all scores with
    the same upper 16 bits."""
    counts = np.zeros(BINS, np.int64)
    run(loops.histogram, values.size, values, score.value, np.float32(center), counts)
    return counts


def _reached(counts: npt.NDArray[np.int64], rank: int) -> tuple[int, int]:
    """Return the bin that holds the element of rank `rank`, and the number of elements in higher bins.

    rank: 1 for the highest score.
    """
    from_top = np.cumsum(counts[::-1])
    steps = int(np.searchsorted(from_top, rank))
    return BINS - 1 - steps, int(from_top[steps - 1]) if steps else 0


def _collect(
    values: Float32, score: Score, center: float, lowest: float, beyond: float = np.nan, *, room: int
) -> _Candidates | None:
    """Return the elements whose score is at least `lowest` and below `beyond` (NaN for no bound); None if
    there are more than `room`."""
    if lowest == -np.inf:
        everything = np.array([[0, values.size]], np.int64)
        return _Candidates(np.arange(values.size, dtype=np.uint32), values, everything)
    limits = np.float32(center), np.float32(lowest), np.float32(beyond)
    return _collected(loops.collect, values.size, room, values, score.value, *limits)


def _add_and_collect(
    gradient: Float32, residual: Float32, left: Float32, lowest: float, *, room: int
) -> _Candidates | None:
    """Write the saturating sum to `left`; return its elements of magnitude `lowest` or more, None if more
    than `room`."""
    apart = address(left) != address(residual)
    stream = apart and left.size >= STREAM_ELEMENTS and address(left) % 64 == 0
    odd = np.zeros(1, np.int64)
    arguments = gradient, residual, left, stream, np.float32(lowest)
    found = _collected(loops.add_and_collect, gradient.size, room, *arguments, more=(odd,))
    if odd[0]:
        raise FloatingPointError("gradient: expected finite values")
    return found


def _collected(
    kernel: Callable[..., None], elements: int, room: int, *arguments: object, more: tuple[object, ...] = ()
) -> _Candidates | None:
    """Run a kernel that writes down the elements it finds, and return them; None if there are more than
    `room`. arguments, more: those of the kernel before and after its outputs."""
    found, values = _scratch.take(room)
    places, total = np.zeros((-(-elements // CHUNK), 2), np.int64), np.zeros(1, np.int64)
    run(kernel, elements, *arguments, found, values, places, total, *more)
    count = int(total[0])
    return None if count > room else _Candidates(found[:count], values[:count], places)


def _best(candidates: _Candidates, keep: int, score: Score, center: float) -> Selection:
    """Return the `keep` best of the candidates.

    Every element of equal or higher score is among the candidates, except zeros if those are not selected.
    """
    found, those, places = candidates
    keep = min(keep, found.size)
    if keep == 0:
        return Selection(np.empty(0, np.uint32), np.empty(0, np.float32))
    scores = score.of(those, center)
    threshold = np.float32(_lowest_of_highest(scores.copy(), keep))
    above = int(np.count_nonzero(scores > threshold))
    if threshold == 0 and score.excludes_zeros(center):
        keep = above
    indices, values = np.empty(keep + LANES, np.uint32), np.empty(keep + LANES, np.float32)
    loops.keep_best(scores, threshold, keep - above, places, found, those, indices, values)
    return Selection(indices[:keep], values[:keep])


def _lowest_of_highest(scores: Float32, number: int) -> float:
    """Return the lowest of the `number` highest scores, at least one; the scores are reordered."""
    place = scores.size - number
    scores.partition(place)
    return float(scores[place])
