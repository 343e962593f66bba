"""The parameters of a link (alpha, beta), fitted to the times that a job's own messages took."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from .profile import Link

SIZES = 1.5  # messages of one kind differ in size by at most this factor
LEAST = 3  # a kind with fewer messages is ignored


def fit(sent_bytes: Sequence[float], seconds: Sequence[float]) -> Link | None:
    """Fit seconds = alpha + beta * bytes, both at least 0, to measured messages; return None if there are too
    few of every size. Messages whose size or time is not positive are ignored.

    The fit is robust. Messages of about the same size count as one kind, and medians represent it. beta is
    the median of the slopes between kinds (Theil and Sen), weighted by the difference in size. Where all
    messages are of one size, alpha cannot be told from beta, and is 0.
    """
    kinds: dict[int, list[tuple[float, float]]] = {}
    for size, taken in zip(sent_bytes, seconds, strict=True):
        if size > 0 and taken > 0 and math.isfinite(taken):
            kinds.setdefault(int(math.log(size, SIZES)), []).append((size, taken))
    points = [
        (statistics.median(size for size, _ in kind), statistics.median(taken for _, taken in kind))
        for _, kind in sorted(kinds.items())
        if len(kind) >= LEAST
    ]
    if not points:
        return None
    slopes = sorted(
        ((taken - before) / (size - smaller), size - smaller)
        for index, (size, taken) in enumerate(points)
        for smaller, before in points[:index]
        if size > smaller
    )
    if not slopes:
        size, taken = points[-1]
        return Link(start_s=0.0, byte_s=taken / size)
    byte_s = max(0.0, _weighted_median(slopes))
    start_s = max(0.0, statistics.median(taken - byte_s * size for size, taken in points))
    return Link(start_s=start_s, byte_s=byte_s)


def _weighted_median(values: Sequence[tuple[float, float]]) -> float:
    """Return the weighted median of (value, weight) pairs, which are sorted by value."""
    half, passed = sum(weight for _, weight in values) / 2, 0.0
    for value, weight in values:
        passed += weight
        if passed >= half:
            return value
    return values[-1][0]
