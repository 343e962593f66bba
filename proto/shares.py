"""The division of samples among workers. Workers choose their samples by it, and the server checks pushes by
it.
"""

from __future__ import annotations

from .messages import Assignment, Coding


def share(samples: int, position: int, world: int, least: int = 1) -> tuple[int, int]:
    """Return start and end of one position's share of `samples` samples.

    If they do not divide evenly, the first positions receive one sample more. If there are too few for shares
    of `least` samples, the last positions receive none.

    Args:
        position: position of the worker, 0 to world - 1.
        world: number of workers that share the samples.
        least: least number of samples in a share.
    """
    world = max(1, min(world, samples // least))
    if position >= world:
        return samples, samples
    base, extra = divmod(samples, world)
    start = position * base + min(position, extra)
    return start, start + base + (1 if position < extra else 0)


def sizes(samples: int, pieces: int) -> tuple[int, ...]:
    """Return the numbers of samples of `pieces` pieces, as even as whole samples allow."""
    return tuple(end - start for start, end in (share(samples, each, pieces) for each in range(pieces)))


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
    """Return the number of batches of up to `most` samples into which `count` samples are divided.

    A remainder of fewer than `least` samples joins the batch before it. A batch has at least `least` samples,
    unless there are fewer.
    """
    whole, rest = divmod(count, max(most, least))
    return whole + (rest >= least or (rest > 0 and not whole))
