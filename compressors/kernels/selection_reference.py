"""Results of the selections, defined in plain numpy. `selection` and `block_selection` compute the same
fast.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..payload import Float32, Int64
from .reference import add_saturating

Indices = npt.NDArray[np.uint32]


class Score(Enum):
    """The measure by which elements x are compared, in float32.

    Attributes:
        MAGNITUDE: |x - center|.
        LARGEST: x.
        SMALLEST: -x.
    """

    MAGNITUDE = 0
    LARGEST = 1
    SMALLEST = 2

    def excludes_zeros(self, center: float) -> bool:
        """Return True if zeros are never selected, because sending them has no effect: by magnitude
        around 0.
        """
        return self is Score.MAGNITUDE and not center

    def of(self, values: Float32, center: float) -> Float32:
        """Return the score of each value, in new memory.

        Args:
            center: number that MAGNITUDE subtracts from each value; the other measures ignore it.
        """
        match self:
            case Score.MAGNITUDE:
                with np.errstate(over="ignore"):
                    scores: Float32 = np.abs(values - np.float32(center) if center else values)
                return scores
            case Score.LARGEST:
                return values.copy()
            case Score.SMALLEST:
                return -values


class Selection(NamedTuple):
    """Selected elements of an array.

    Attributes:
        indices: their indices, uint32, ascending.
        values: their values, float32, in the same order.
    """

    indices: Indices
    values: Float32

    def moved(self, start: int) -> Selection:
        """Return the selection with `start` added to every index."""
        return Selection(self.indices + np.uint32(start), self.values) if start else self


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
