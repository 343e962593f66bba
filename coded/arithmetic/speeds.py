"""Sizes of the blocks of a batch by the speeds of the nodes, so that all nodes compute for equally long.

Source: the coded SGD paper, section 2.1: "the number of samples on each node can be adjusted dynamically by
the node's performance, and does not affect the load of other nodes within limits". It gives no formula. The
samples of a batch are divided into blocks of different sizes here. Packets stay as large as they are, because
a block's gradient has the size of the model however many samples are behind it. The sum over all blocks is
that over all samples, independent of the sizes, so the mean stays exact.

1. A node can compute at most the whole batch. So node i computes the fraction p_i = min(1, c * speed_i), with
   the c for which all p_i add up to the redundancy r.
2. Blocks with these fractions exist for every such p. Lay the p_i end to end from 0 to r. Each u in [0, 1)
   names the r nodes in whose stretches u, u + 1, ... lie, as in systematic sampling. The block of these nodes
   gets the length of the u that name them.
3. As much of the batch as possible is divided equally among all blocks, and only the rest in this way. Equal
   speeds make equal blocks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import comb, floor

# Shorter stretches of u come from rounding, and smaller differences of speed count as none. A division by the
# difference enlarges the rounding, so this is far above the resolution of float64.
SHORTEST = 1e-6


def fractions(speeds: Sequence[float], redundancy: int) -> list[float]:
    """Return the fraction of the batch that each node computes: in proportion to its speed, and at most 1.

    Args:
        speeds: samples per second of each node, positive.
        redundancy: number of nodes that compute each block, which is the sum of the fractions.
    """
    found = [1.0] * len(speeds)
    left = float(redundancy)
    rest: set[int] = set(range(len(speeds)))
    while rest:
        scale = left / sum(speeds[node] for node in rest)
        below: set[int] = {node for node in rest if scale * speeds[node] < 1}
        if len(below) == len(rest):
            for node in rest:
                found[node] = scale * speeds[node]
            break
        # The fast ones compute everything; the others divide the remaining samples.
        left -= len(rest) - len(below)
        rest = below
    return found


def block_sizes(
    samples: int, holders: Sequence[Sequence[int]], speeds: Sequence[float], least: int = 1
) -> tuple[int, ...]:
    """Return the number of samples of each block, by block. They add up to `samples`.

    Args:
        holders: nodes that compute each block, ascending, by block: every r-subset of the nodes once.
        speeds: samples per second of each node, positive.
        least: smallest number of samples of a block that has any.
    """
    nodes, redundancy = len(speeds), len(holders[0])
    assert len(holders) == comb(nodes, redundancy)
    number = {tuple(each): block for block, each in enumerate(holders)}
    wanted, even = fractions(speeds, redundancy), redundancy / nodes
    if redundancy == nodes:
        return (samples,)
    # The least part of the batch that cannot be divided equally: the rest of `wanted` has to stay in [0, 1].
    uneven = max(max(1 - each / even, (each - even) / (1 - even)) for each in wanted)
    weights = [(1 - uneven) / len(holders)] * len(holders)
    if uneven > SHORTEST:
        rest = [min(1.0, max(0.0, even + (each - even) / uneven)) for each in wanted]
        for subset, length in _lengths_of_subsets(rest, redundancy).items():
            weights[number[subset]] += uneven * length
    return _whole(samples, weights, least)


def _lengths_of_subsets(stretches: Sequence[float], redundancy: int) -> dict[tuple[int, ...], float]:
    """Return how long the block of each subset of `redundancy` nodes is, as a fraction of the batch.

    Stretches of 0.5, 0.5 and 1 end at 0.5, 1 and 2. A u below 0.5 names the nodes at u and u + 1, which are 0
    and 2; a larger one names 1 and 2. So each of these two subsets gets one half.

    Args:
        stretches: fraction of each node, 0 to 1; they add up to `redundancy`.
    """
    ends = [*accumulate(stretches)]
    found = defaultdict[tuple[int, ...], float](float)
    # Where u or u + 1 or … passes the end of a stretch, the next subset begins.
    borders = sorted({0.0, 1.0, *(end - floor(end) for end in ends)})
    for begin, end in pairwise(borders):
        if end - begin < SHORTEST:
            continue
        u = (begin + end) / 2
        found[tuple(bisect_right(ends, u + turn) for turn in range(redundancy))] += end - begin
    return found


def _whole(samples: int, weights: Sequence[float], least: int) -> tuple[int, ...]:
    """Return whole numbers of samples in proportion to the weights, which add up to `samples`. None is below
    `least` but 0: the samples of such blocks go to the largest block."""
    exact = [samples * weight / sum(weights) for weight in weights]
    found = [floor(each) for each in exact]
    by_rest = sorted(range(len(exact)), key=lambda block: found[block] - exact[block])
    for block in by_rest[: samples - sum(found)]:
        found[block] += 1
    largest = max(range(len(found)), key=lambda block: found[block])
    for block, each in enumerate(found):
        if block != largest and 0 < each < least:
            found[largest] += each
            found[block] = 0
    return tuple(found)
