"""Constants, results and small functions that kernels and their callers share. Imports no numba."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...common.stored import stored
from ..payload import Float32

LANES = 16  # elements of a vector

# Elements that a thread claims at a time: a multiple of every kernel's block, long enough (tens of
# microseconds) that claiming costs nothing, short enough that threads end together.
CHUNK = 1 << 18

# Thresholds of a layer follow from its mean magnitude, so a sum must not depend on the number of threads or
# of vector lanes. It is defined over blocks of 256 rows by 16 lanes, in float64: each lane adds its elements,
# then the lanes are added in order, and then the blocks.
SUM_BLOCK = LANES * 256

BINS = 1 << 16  # bins of the histogram in `selection_loops`

# Sums of gradient and residual are clipped to this magnitude, so that finite gradients leave finite
# residuals.
FLOAT32_MAX = np.finfo(np.float32).max
# Values in both 16-bit formats are clipped to the largest finite one: a receiver would refuse an infinity.
# The residual keeps the difference.
BFLOAT16_MAX = np.array([0x7F7F0000], np.uint32).view(np.float32)[0]
FLOAT16_MAX = np.float32(65504.0)

# splitmix64: the n-th state is the seed plus n times this odd number, modulo 2**64.
STEP = 0x9E3779B97F4A7C15
MULTIPLIERS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

Indices = npt.NDArray[np.uint32]


@stored("magnitudes")
class Magnitudes(NamedTuple):
    """The mean-magnitude statistics of one tensor.

    Attributes:
        total: sum of the elements' absolute values; infinite or NaN exactly if an element is.
        nonzero: number of elements that are not zero.
    """

    total: float
    nonzero: int


class Selection(NamedTuple):
    """Selected elements of an array: their indices, ascending, and their values."""

    indices: Indices
    values: Float32

    def moved(self, start: int) -> Selection:
        """Return the selection with `start` added to every index."""
        return Selection(self.indices + np.uint32(start), self.values) if start else self


class Score(Enum):
    """The measure by which elements x are compared, in float32: |x - center|, x or -x."""

    MAGNITUDE = 0
    LARGEST = 1
    SMALLEST = 2

    def excludes_zeros(self, center: float) -> bool:
        """Return True if zeros are never selected, because sending them has no effect: by magnitude around
        0."""
        return self is Score.MAGNITUDE and not center

    def of(self, values: Float32, center: float) -> Float32:
        """Return the score of each value, in new memory; only MAGNITUDE uses the center."""
        match self:
            case Score.MAGNITUDE:
                with np.errstate(over="ignore"):
                    scores: Float32 = np.abs(values - np.float32(center) if center else values)
                return scores
            case Score.LARGEST:
                return values.copy()
            case Score.SMALLEST:
                return -values


def add_saturating(gradient: Float32, residual: Float32) -> Float32:
    """Return gradient + residual, clipped to the finite float32 range."""
    with np.errstate(over="ignore"):
        total: Float32 = np.clip(gradient + residual, -FLOAT32_MAX, FLOAT32_MAX)
    return total
