"""Spikes: gradients of a tensor that are far larger than those of the previous steps.

With error feedback a compressor cannot get rid of a spike. It sends as much as its levels or its k elements
hold, and the residual is larger than every gradient that follows. After one gradient of a million times the
usual size, `1bit` sends more than ten times the usual norm for 1,449 steps, `topk:ratio=100` for 190, and
`4bit` for 67. The option `--clip-norm`, which acts at the server, never sees the spike as a whole.

In such a step the tensor is therefore sent whole: as float32, with all of its residual. Nothing is cut off,
the residual is 0 afterwards, the compressor's state is not updated, and the server clips as it would without
compression. A tensor that is mistaken for a spike costs bytes, not accuracy. The usual magnitude of each
tensor is kept in the ledger, where it is committed and restored with the residual.

A gradient is a spike if its mean magnitude is more than `LIMIT` times the running one. Both means leave out
elements that are 0, because rows of an embedding that no sample touched say nothing about the other rows. For
large tensors they are those of a sample. It costs next to nothing, and does not depend on the kernel that
compresses the tensor, on its neighbours, or on the plan. One call serves all tensors of a unit, because a
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
# Steps before the running magnitude is used: gradients of layers that begin with zeros grow fast.
FIRST = 10
# Weight of the newest step in the running magnitude, after the first 1 / NEWEST steps, which weigh equally.
NEWEST = 0.1
# A step enters the running magnitude with at most LARGEST times its value. One spike then does not hide the
# next, and a lasting change is followed within a few steps.
LARGEST = 10.0


# Rows of the statistics of tensors, float64 of shape (3, tensors):
# MEAN: running mean magnitude of a tensor's gradients, over elements that are not 0.
# STEPS: number of steps in it.
# DUE: 1 if the next push sends the tensor whole, because a spike is in the residual, otherwise 0.
MEAN, STEPS, DUE = ROWS = range(3)


def judge(usual: Float64, totals: Float64, nonzero: Float64 | Int64) -> tuple[Float64, Float64]:
    """Compare gradients with the usual magnitudes of their tensors, and update these.

    Args:
        usual: statistics of the tensors; rows as in `ROWS`.
        totals: sum of the absolute values of each gradient.
        nonzero: number of elements of each gradient that are not 0. A gradient without any is ignored, as is
            one whose total is not finite.

    Returns:
        The ratio of each gradient's mean magnitude to the usual one, 0 while too few steps are known; and the
            updated statistics.
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
    """A spike in one tensor's gradient. factor: ratio of its mean magnitude to the usual one."""

    name: str
    factor: float


def keeps_spikes(compressor: Compressor) -> bool:
    """Return True if a spike would stay in the compressor's residual.

    `bf16` has the range of float32, and leaves only 1/256 of a spike in the residual.
    """
    return isinstance(compressor, ErrorFeedback) and compressor.compressor != Dense(
        format=DenseFormat.BFLOAT16
    )


def described(spikes: list[Spike]) -> str:
    """Return the text of the warning about the spikes of one push, of which there is at least one."""
    largest = max(spikes, key=lambda each: each.factor)
    others = f" (and {len(spikes) - 1} more)" if len(spikes) > 1 else ""
    return (
        f"gradient of {largest.name!r} is {largest.factor:.3g} times as large as usual{others}; "
        "sent whole, as float32, to keep it out of the error-feedback residual"
    )
