"""The samples of an assignment: a pure function of the job's seed and the assignment.

Each epoch is one permutation of the training samples, drawn from (seed, epoch). An assignment names ranges of
the permutation, and the server puts each sample into one assignment. Nothing here depends on the workers'
identities, so an epoch continues without a gap or a repetition when workers join or leave.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from ...proto.messages import Assignment
from ...proto.shares import share
from ...proto.straggler_code import parts_of, straggler_code
from .splits import SampleSplit

Indices = npt.NDArray[np.int64]


class Shards:
    """Finds the samples of assignments. Caches the order of one epoch, and one worker's share of a split."""

    def __init__(self, seed: int, train_samples: int, split: SampleSplit | None = None) -> None:
        """split: how samples are divided among workers; None for samples that are distributed alike."""
        self._seed, self._samples, self._split = seed, train_samples, split
        self._epoch, self._order = -1, np.empty(0, np.int64)
        self._of = (-1, -1, -1)  # epoch, position and world of `_order` in a split

    def of(self, assignment: Assignment) -> Indices:
        """Return the indices of an assignment's samples: int64, shape (samples,)."""
        if self._split is not None:
            return self._of_share(assignment, self._split)
        if assignment.epoch != self._epoch:
            self._epoch = assignment.epoch
            self._order = epoch_order(self._seed, assignment.epoch, self._samples)
        return shard(self._order, assignment)

    def _of_share(self, assignment: Assignment, split: SampleSplit) -> Indices:
        """Return as many samples of the worker's own share as the assignment has.

        A round of `world` workers advances in the epoch by `world` times as much as one of them. So the
        start of a range, divided by `world`, is the worker's place in its own share. A small share repeats.
        """
        world = max(1, assignment.world)
        place = (assignment.epoch, assignment.position % world, world)
        if place != self._of:
            self._of = place
            own = split.share(place[1], world)
            self._order = own[np.random.default_rng([self._seed, *place]).permutation(len(own))]
        steps = [np.arange(each.count) + each.start // world for each in assignment.ranges]
        wanted: Indices = np.concatenate([np.empty(0, np.int64), *steps]) % len(self._order)
        return self._order[wanted]


def epoch_order(seed: int, epoch: int, train_samples: int) -> Indices:
    """Return the samples' order in an epoch, which is counted from 0: indices, shape (train_samples,)."""
    return np.random.default_rng([seed, epoch]).permutation(train_samples)


def shard(order: Indices, assignment: Assignment) -> Indices:
    """Return the entries of an epoch's order that an assignment's ranges name, end to end."""
    if not assignment.ranges:
        return order[:0]
    return np.concatenate([order[each.start : each.start + each.count] for each in assignment.ranges])


@dataclass(frozen=True, slots=True, eq=False)
class CodedPart:
    """One part of the samples of a round with straggler codes, which some members compute redundantly.

    Attributes:
        weight: factor by which this member multiplies the mean gradient over these samples.
    """

    number: int
    indices: Indices
    weight: float


def coded_parts(indices: Indices, assignment: Assignment) -> list[CodedPart]:
    """Return the parts of a round with straggler codes that one member computes.

    The weighted sum of the parts' mean gradients has the size of a mean over all samples of these parts.
    assignment: assignment of the member; its position and number of stragglers select the parts.
    """
    code = straggler_code(assignment.world, assignment.stragglers)
    numbers = parts_of(assignment.position, assignment.world, assignment.stragglers)
    bounds = [share(len(indices), number, assignment.world) for number in numbers]
    own = sum(end - start for start, end in bounds)
    return [
        CodedPart(number, indices[start:end], coefficient * (end - start) / own)
        for number, (start, end), coefficient in zip(
            numbers, bounds, code.coefficients(assignment.position), strict=True
        )
    ]


def bounds(assignment: Assignment) -> list[slice]:
    """Return the batches that an assignment names, as ranges of positions among its samples; none if it names
    none."""
    ends = list(accumulate(assignment.batches))
    return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def batches(samples: int, batch_size: int, least: int = 1) -> list[slice]:
    """Divide an assignment's samples into as few batches as `batch_size` allows, as evenly as possible.
    Returns the batches in order, as ranges of positions in the assignment. least: smallest number of samples
    in a batch, unless `samples` itself is smaller. It may make batches larger than `batch_size`.
    """
    steps = min(-(-samples // batch_size), max(1, samples // least))
    return [slice(*share(samples, step, steps)) for step in range(steps)]
