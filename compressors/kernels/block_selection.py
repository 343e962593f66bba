"""Selection in many small blocks of one array."""

from __future__ import annotations

import numpy as np

from ..payload import Float32, Int64
from .checks import check
from .lazy import block_selection_loops as loops
from .shared import Selection
from .threads import run


def select_blocks(
    values: Float32, sizes: Int64, keeps: Int64, lowest: Float32, centers: Float32
) -> Selection:
    """Select at most `keeps[b]` elements of each block b: those with the largest magnitude |x - centers[b]|,
    among the elements whose magnitude is at least `lowest[b]`.

    Of equal magnitudes the lower index is selected. Blocks should be small: one thread reads each several
    times.

    Args:
        values: all blocks, end to end; finite. Selected indices count from its beginning.
        sizes: number of elements of each block, shape (blocks,), as the other arguments.
        keeps: from 0 to the block's size.
        lowest: not negative.
        centers: finite.
    """
    check("values", values, np.float32, values.size)
    check("sizes", sizes, np.int64, sizes.size)
    check("keeps", keeps, np.int64, sizes.size)
    check("lowest", lowest, np.float32, sizes.size)
    check("centers", centers, np.float32, sizes.size)
    if ((keeps < 0) | (keeps > sizes)).any():
        raise ValueError("keeps: expected values from 0 to the size of each block")
    starts, places = _starts(sizes), _starts(keeps)
    if starts[-1] != values.size:
        raise ValueError(f"sizes: expected {values.size} elements in all, got {starts[-1]}")
    if not (lowest >= 0).all():
        raise ValueError("lowest: expected values of at least 0, without NaN")
    room = int(places[-1])
    indices, chosen = np.empty(room, np.uint32), np.empty(room, np.float32)
    counts = np.empty(sizes.size, np.int64)
    # The kernel compares bits, and those of -0 are above all magnitudes: `abs` makes it 0.
    given = values, starts, keeps, np.abs(lowest), centers, places
    run(loops.choose, values.size, *given, indices, chosen, counts)
    if int(counts.sum()) < room:  # too few elements reach `lowest`: close the gaps between blocks
        inside = np.arange(room) - np.repeat(places[:-1], keeps) < np.repeat(counts, keeps)
        indices, chosen = indices[inside], chosen[inside]
    return Selection(indices, chosen)


def warm_up() -> None:
    """Compile every kernel of this module, or load it from the cache."""
    two, ones = np.full(2, 2, np.int64), np.ones(2, np.float32)
    select_blocks(np.arange(4, dtype=np.float32), two, two - 1, ones, ones)


def _starts(sizes: Int64) -> Int64:
    starts = np.zeros(sizes.size + 1, np.int64)
    np.cumsum(sizes, out=starts[1:])
    return starts
