"""Which samples a worker takes: a pure function of the job's seed and the round's assignment.

Each epoch is one permutation of the training samples, drawn from (seed, epoch). A round takes the next
`samples` of it and divides them among its members by position, as evenly as whole samples allow. Nothing
depends on who the members are, so that an epoch goes on without a seam when they change.
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
    """The indices of this worker's samples in this round; empty if there are fewer samples than workers."""
    start, end = share(assignment.samples, assignment.position, assignment.world)
    return order[assignment.start + start : assignment.start + end]
