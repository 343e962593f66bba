"""Spikes: gradients of a tensor that are far larger than those of the steps before.

With error feedback a compressor does not get rid of a spike. It sends of it what its levels or its k elements
hold, and what is left is larger than every gradient that follows. After one gradient of a million times the
usual size `1bit` sends more than ten times the usual norm for 1,449 steps, `topk:ratio=100` for 190, `4bit`
for 67, and `--clip-norm`, which acts at the server, never sees the spike as a whole.

So in such a step the tensor is sent whole: as float32, with all that is owed of it. Nothing is cut off, the
residual is zero afterwards, what the compressor remembers does not hear of it, and the server clips what it
would clip without compression. A tensor that is taken for a spike by mistake costs bytes, not accuracy. What
is usual for each tensor is kept in the ledger, where it is committed and restored with the residual.

A gradient is a spike if its mean magnitude is more than `LIMIT` times the running one. Both are those of the
elements that are not 0, as rows of an embedding that no sample touched say nothing about the others; and of
large tensors those of a sample, which costs next to nothing and does not depend on the kernel that the
tensor is compressed by, on its neighbours, or on the plan. One call serves all tensors of a unit, because a
call for each would take longer than compressing a small one. One large element among many small ones is no
spike: see docs/reference/compressors.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .base import Compressor
from .dense import Dense
from .feedback import ErrorFeedback
from .payload import DenseFormat, Float64, Int64

# Ordinary trainings stayed below 13, embeddings below 90 and a network that had learnt its samples below 230
# (docs/reference/compressors.md).
LIMIT = 100.0
# Steps before the running magnitude says anything: gradients of layers that begin with zeros grow fast.
FIRST = 10
# Weight of the newest step in the running magnitude, once there have been as many steps as that takes.
NEWEST = 0.1
# A step counts as no more than so many times the running magnitude: one spike does not hide the next, and a
# change that stays is followed within a few steps.
LARGEST = 10.0


# Rows of what is usual for tensors, float64 of shape (3, tensors): the running mean magnitude of a tensor's
# gradients, of elements that are not 0; the number of steps behind it; and 1 where the next push sends the
# tensor whole, because a spike is in the residual, otherwise 0.
MEAN, STEPS, DUE = ROWS = range(3)


def judge(usual: Float64, totals: Float64, nonzero: Float64 | Int64) -> tuple[Float64, Float64]:
    """Compare gradients with what is usual for their tensors.

    Args:
        usual: see `ROWS`.
        totals: sum of the absolute values of each gradient.
        nonzero: number of its elements that are not 0. A gradient without any says nothing, and neither does
            one whose total is not finite: that is raised where all of it is looked at.

    Returns how many times as large as usual each gradient is, 0 while nothing is usual, and what is usual
    after it.
    """
    mean, steps, due = usual
    says, known = (nonzero > 0) & (totals < np.inf), steps >= FIRST
    means = np.divide(totals, nonzero, out=mean.copy(), where=says)
    factors = np.divide(means, mean, out=np.zeros_like(mean), where=known)
    means = np.minimum(means, LARGEST * mean, out=means, where=known)
    weight = np.maximum(NEWEST, 1 / (steps + 1))
    return factors, np.stack([mean + weight * (means - mean), steps + says, due])


@dataclass(frozen=True, slots=True)
class Spike:
    """name: of the tensor. factor: how many times as large as usual its gradient is."""

    name: str
    factor: float


def keeps_spikes(compressor: Compressor) -> bool:
    """Whether a spike would stay in error feedback. `bf16` has the range of float32, and leaves a 256th."""
    return isinstance(compressor, ErrorFeedback) and compressor.compressor != Dense(
        format=DenseFormat.BFLOAT16
    )


def described(spikes: list[Spike]) -> str:
    """Return what a warning says of one push. spikes: at least one."""
    largest = max(spikes, key=lambda each: each.factor)
    others = f" (others that are too large: {len(spikes) - 1})" if len(spikes) > 1 else ""
    return (
        f"gradient of {largest.name!r} is {largest.factor:.3g} times as large as usual{others}; "
        "sent whole, as float32, so that nothing of it stays in error feedback"
    )
