"""Which samples a worker takes: a pure function of the job's seed and its assignment.

Each epoch is one permutation of the training samples, drawn from (seed, epoch). An assignment names ranges of
it, and the server sees to it that each sample is in one assignment. Nothing here depends on who the workers
are, so that an epoch goes on without a seam when they change.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..proto.messages import Assignment
from ..proto.shares import share

Indices = npt.NDArray[np.int64]


def epoch_order(seed: int, epoch: int, train_samples: int) -> Indices:
    """The order of the samples in an epoch: shape (train_samples,)."""
    return np.random.default_rng([seed, epoch]).permutation(train_samples)


def shard(order: Indices, assignment: Assignment) -> Indices:
    """The indices of this worker's samples."""
    if not assignment.ranges:
        return order[:0]
    return np.concatenate([order[each.start : each.start + each.count] for each in assignment.ranges])


def batches(indices: Indices, batch_size: int) -> list[Indices]:
    """Divided into as few batches as `batch_size` allows, as evenly as whole samples allow."""
    steps = -(-len(indices) // batch_size)
    bounds = [share(len(indices), step, steps) for step in range(steps)]
    return [indices[start:end] for start, end in bounds]
