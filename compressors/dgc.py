"""`dgc`: deep gradient compression, a sparsifier that estimates its threshold from a sample.

Source: Lin et al., "Deep Gradient Compression" (ICLR 2018). Its components, and where they are:

    sampled threshold:     here. The threshold is exceeded by the fraction k / n of a random sample. If more
                           than k elements exceed it, the largest k of those are taken (the paper's
                           hierarchical selection). If fewer do, only those are sent.
    momentum correction:   `momentum`, with masking, in `feedback`; the server takes plain SGD steps.
    local clipping:        `clip`, in `budget`.
    warm-up:               `warmup` epochs, in `sparsifiers.SparseOptions`; the learning rate's is the
                           server's schedule (`--schedule constant:warmup=4`).
"""

from __future__ import annotations

import math

import numpy as np
import torch

from .base import Neighbours, StepContext
from .kernels import selection
from .kernels.block_selection import select_blocks
from .kernels.shared import Selection
from .payload import Float32, Int64
from .sparse import Sparse, coder_of
from .sparsifiers import DgcOptions

# The sample is this fraction of the elements, but at least FEWEST_SAMPLED, or all of them.
SAMPLED_PART = 0.01
FEWEST_SAMPLED = 1000


def _threshold(values: Float32, keep: int, context: StepContext) -> float:
    """Return the magnitude that about `keep` elements exceed, from a sample; the least one for a small
    tensor."""
    size = max(FEWEST_SAMPLED, int(SAMPLED_PART * values.size))
    if size >= values.size:
        return selection.LEAST
    sample = np.abs(values[context.rng.integers(values.size, size=size)])
    rank = size - math.ceil(size * keep / values.size)
    return max(selection.LEAST, float(np.partition(sample, rank)[rank]))


def _above_sampled_threshold(total: torch.Tensor, keep: int, context: StepContext) -> Selection:
    """Choose at most `keep` elements above the sampled threshold; of a small tensor the largest `keep`,
    exactly."""
    values = total.numpy()
    if values.size <= FEWEST_SAMPLED:
        return selection.select(values, keep)
    found = selection.at_least(values, _threshold(values, keep, context))
    if found.indices.size > keep:
        largest = selection.select(found.values, keep)
        return Selection(found.indices[largest.indices], largest.values)
    return found


def _each_above_its_own(values: Float32, tensors: Neighbours, keeps: Int64) -> Selection:
    """Choose from each of several tensors at most the given number of elements above its own threshold."""
    lowest = np.array(
        [
            _threshold(values[start:end], keep, tensors.context(index))
            for index, ((start, end), keep) in enumerate(zip(tensors.bounds(), keeps.tolist(), strict=True))
        ],
        np.float32,
    )
    return select_blocks(values, tensors.sizes, keeps, lowest, np.zeros_like(lowest))


def dgc(options: DgcOptions) -> Sparse:
    return Sparse(
        options=options,
        coder=coder_of(options.values),
        select=_above_sampled_threshold,
        select_each=_each_above_its_own,
    )
