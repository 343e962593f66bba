"""Gradients as 32-bit integers, whose sums can be subtracted again without rounding.

±10 is ±0x7FFFFFFF, in equal steps of 4.7e-9; sums are modulo 2³² and wrap. Values outside ±10 are clipped and
counted. Source: the coded SGD paper.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FIXED_POINT_LIMIT = 10.0
_LARGEST = 0x7FFFFFFF
_PIECE = 1 << 15  # elements converted at a time: the float64 intermediates stay in the cache

Float32 = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint32]


def to_fixed_point(values: Float32, out: Words, scale: float = 1.0) -> int:
    """Write `values` times `scale` to `out` as fixed-point integers, rounded to nearest, ties to even.

    Args:
        values: shape (elements,).
        out: receives the integers as two's complement, shape (elements,).

    Returns:
        The number of values outside the range, which were clipped. NaN counts as outside and becomes 0.
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
    """Convert sums of fixed-point integers, times `scale`, to float32 in `out`, rounding once.

    Args:
        sums: shape (elements,).
        out: receives the values, shape (elements,).
    """
    for start in range(0, sums.size, _PIECE):
        values = sums[start : start + _PIECE].astype(np.float64)
        values *= scale * (FIXED_POINT_LIMIT / _LARGEST)
        out[start : start + _PIECE] = values
