"""What the selections compute, in plain numpy. See `selection`."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..payload import Float32, Int64
from .reference import add_saturating

Indices = npt.NDArray[np.uint32]


class Score(Enum):
    """By what elements x are compared, in float32: |x - center|, x, or -x."""

    MAGNITUDE = 0
    LARGEST = 1
    SMALLEST = 2

    def excludes_zeros(self, center: float) -> bool:
        """Whether zeros are chosen by nobody: they are nothing to send."""
        return self is Score.MAGNITUDE and not center

    def of(self, values: Float32, center: float) -> Float32:
        """Freshly allocated."""
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
    """indices: uint32, ascending. values: float32, of the elements there."""

    indices: Indices
    values: Float32

    def moved(self, start: int) -> Selection:
        """Counted from so many elements before."""
        return Selection(self.indices + np.uint32(start), self.values) if start else self


def select(values: Float32, keep: int, *, score: Score = Score.MAGNITUDE, center: float = 0.0) -> Selection:
    """The `keep` elements of highest score; of equals that with the lower index. No zeros by magnitude."""
    chosen = np.sort(np.argsort(-score.of(values, center), kind="stable")[:keep])
    if score.excludes_zeros(center):
        chosen = chosen[values[chosen] != 0]
    return Selection(chosen.astype(np.uint32), values[chosen])


def add_and_select(gradient: Float32, residual: Float32, keep: int) -> Selection:
    """Leave the saturating sum in `residual` and select from it by magnitude."""
    residual[:] = add_saturating(gradient, residual)
    return select(residual, keep)


def median(values: Float32) -> float:
    """The lower one of two."""
    return float(np.sort(values)[(values.size - 1) // 2])


def at_least(values: Float32, threshold: float) -> Selection:
    """The elements with |x| of `threshold` or more."""
    found = np.flatnonzero(np.abs(values) >= np.float32(threshold))
    return Selection(found.astype(np.uint32), values[found])


def select_blocks(
    values: Float32, sizes: Int64, keeps: Int64, lowest: Float32, centers: Float32
) -> Selection:
    """Of each block, which is so many consecutive elements, at most `keeps` of those with |x - center| of
    `lowest` or more: the ones farthest from the center, of equals that with the lower index."""
    found: list[Indices] = []
    for end, size, keep, least, center in zip(np.cumsum(sizes), sizes, keeps, lowest, centers, strict=True):
        block = values[end - size : end]
        scores = Score.MAGNITUDE.of(block, float(center))
        order = np.argsort(-scores, kind="stable")
        chosen = np.sort(order[scores[order] >= least][:keep])
        found.append((chosen + (end - size)).astype(np.uint32))
    indices = np.concatenate([np.empty(0, np.uint32), *found])
    return Selection(indices, values[indices])
