"""What a message takes on a link, from what a job's own sends took."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from .profile import Link

SIZES = 1.5  # a kind of messages is up to so many times as large as its smallest
LEAST = 3  # messages of a kind that counts


def fit(sent_bytes: Sequence[float], seconds: Sequence[float]) -> Link | None:
    """alpha and beta of seconds = alpha + beta * bytes, each at least 0; None of too few messages.

    Robust: of messages of about the same size the median counts, and of the slopes between kinds of messages
    the median (Theil and Sen), weighted by how far apart they are. Where all messages are of one size, alpha
    cannot be told from beta, and is 0.
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
        for place, (size, taken) in enumerate(points)
        for smaller, before in points[:place]
        if size > smaller
    )
    if not slopes:
        size, taken = points[-1]
        return Link(start_s=0.0, byte_s=taken / size)
    byte_s = max(0.0, _weighted_median(slopes))
    start_s = max(0.0, statistics.median(taken - byte_s * size for size, taken in points))
    return Link(start_s=start_s, byte_s=byte_s)


def _weighted_median(values: Sequence[tuple[float, float]]) -> float:
    """values: ascending, with weights."""
    half, passed = sum(weight for _, weight in values) / 2, 0.0
    for value, weight in values:
        passed += weight
        if passed >= half:
            return value
    return values[-1][0]
