"""Gradients as 32-bit integers, so that sums of them can be taken apart again to the bit.

±10 is ±0x7FFFFFFF, in equal steps of 4.7e-9; sums are modulo 2³² and wrap. What lies outside is clipped and
counted. Source: the coded SGD paper.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FIXED_POINT_LIMIT = 10.0
_LARGEST = 0x7FFFFFFF
_PIECE = 1 << 15  # elements at a time, so that what is in between stays in the cache

Float32 = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint32]


def to_fixed_point(values: Float32, out: Words, scale: float = 1.0) -> int:
    """Write `values` times `scale` to `out`, each rounded to the nearest step, ties to even.

    values, out: of equal shape (elements,). Returns how many were outside and were clipped; of those, what is
    not a number becomes 0.
    """
    clipped = 0
    for start in range(0, values.size, _PIECE):
        steps = values[start : start + _PIECE].astype(np.float64)
        steps *= scale * (_LARGEST / FIXED_POINT_LIMIT)
        np.rint(steps, out=steps)
        outside = ~(np.abs(steps) <= _LARGEST)
        count = int(np.count_nonzero(outside))
        if count:
            clipped += count
            np.nan_to_num(steps, copy=False, nan=0.0)
            np.clip(steps, -_LARGEST, _LARGEST, out=steps)
        out[start : start + _PIECE] = steps.astype(np.int32).view(np.uint32)
    return clipped


def from_fixed_point(sums: npt.NDArray[np.int64], out: Float32, scale: float = 1.0) -> None:
    """Write what sums of fixed-point values stand for, times `scale`, to `out`, rounded to float32 once."""
    for start in range(0, sums.size, _PIECE):
        values = sums[start : start + _PIECE].astype(np.float64)
        values *= scale * (FIXED_POINT_LIMIT / _LARGEST)
        out[start : start + _PIECE] = values
