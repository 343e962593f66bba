"""Results of the selections, defined in plain numpy. `selection` and `block_selection` compute the same
fast.
"""

from __future__ import annotations

import numpy as np
from plain_codes import add_saturating

from gradwire.compressors.kernels.shared import Indices, Score, Selection
from gradwire.compressors.payload import Float32, Int64


def select(values: Float32, keep: int, *, score: Score = Score.MAGNITUDE, center: float = 0.0) -> Selection:
    """Return the `keep` elements of highest score; of equal scores, the lower index. By magnitude, no
    zeros.
    """
    chosen = np.sort(np.argsort(-score.of(values, center), kind="stable")[:keep])
    if score.excludes_zeros(center):
        chosen = chosen[values[chosen] != 0]
    return Selection(chosen.astype(np.uint32), values[chosen])


def add_and_select(gradient: Float32, residual: Float32, keep: int) -> Selection:
    """Replace `residual` by the saturating sum gradient + residual, and return its `keep` elements of largest
    magnitude.
    """
    residual[:] = add_saturating(gradient, residual)
    return select(residual, keep)


def median(values: Float32) -> float:
    """Return the median of `values`; of an even number of elements, the lower of the middle two."""
    return float(np.sort(values)[(values.size - 1) // 2])


def at_least(values: Float32, threshold: float) -> Selection:
    """Return all elements with |x| of `threshold` or more."""
    found = np.flatnonzero(np.abs(values) >= np.float32(threshold))
    return Selection(found.astype(np.uint32), values[found])


def select_blocks(
    values: Float32, sizes: Int64, keeps: Int64, lowest: Float32, centers: Float32
) -> Selection:
    """Select at most `keeps[b]` elements of block b, those with the largest |x - centers[b]| of `lowest[b]`
    or more.

    Of equal magnitudes the lower index is selected.

    Args:
        values: all blocks, end to end.
        sizes: number of elements of each block.

    Returns:
        The selected elements; indices count from the beginning of `values`.
    """
    found: list[Indices] = []
    for end, size, keep, least, center in zip(np.cumsum(sizes), sizes, keeps, lowest, centers, strict=True):
        block = values[end - size : end]
        scores = Score.MAGNITUDE.of(block, float(center))
        order = np.argsort(-scores, kind="stable")
        chosen = np.sort(order[scores[order] >= least][:keep])
        found.append((chosen + (end - size)).astype(np.uint32))
    indices = np.concatenate([np.empty(0, np.uint32), *found])
    return Selection(indices, values[indices])
