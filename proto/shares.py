"""The division of a round's samples, by which workers take their share and the server checks pushes."""

from __future__ import annotations

from .messages import Assignment, Coding


def share(samples: int, position: int, world: int, least: int = 1) -> tuple[int, int]:
    """Start and end of a position's part of `samples`; the first ones get one more if it does not divide.
    Where there are too few for parts of at least `least`, the last positions get none."""
    world = max(1, min(world, samples // least))
    if position >= world:
        return samples, samples
    base, extra = divmod(samples, world)
    start = position * base + min(position, extra)
    return start, start + base + (1 if position < extra else 0)


def block_share(coding: Coding, samples: int, block: int, blocks: int, least: int = 1) -> tuple[int, int]:
    """Start and end of a block's part of `samples`: by `coding.sizes`, or an equal part as in `share`."""
    if not coding.sizes:
        return share(samples, block, blocks, least)
    start = sum(coding.sizes[:block])
    return start, start + coding.sizes[block]


def assigned_samples(assignment: Assignment) -> int:
    """Return the number of samples in all ranges of an assignment."""
    return sum(each.count for each in assignment.ranges)


def draws(count: int, most: int, least: int = 1) -> int:
    """Return how often up to `most` of `count` samples can be drawn, never leaving fewer than `least`."""
    whole, rest = divmod(count, max(most, least))
    return whole + (rest >= least or (rest > 0 and not whole))
