"""`dgc`: deep gradient compression, a sparsifier that estimates its threshold from a sample.

Source: Lin et al., "Deep Gradient Compression" (ICLR 2018). Its parts and where they are:

    sampled threshold       here: the k-th part of a random sample; if more than k elements exceed it, the
                            largest k of those are taken (the paper's hierarchical selection). Fewer are sent
                            as they are
    momentum correction     `momentum`, with masking, in `feedback`; the server takes plain SGD steps
    local clipping          `clip`, in `model`
    warm-up                 `warmup` epochs, in `sparsifiers.SparseOptions`; the learning rate's is the
                            server's schedule (`--schedule constant:warmup=4`)
"""

from __future__ import annotations

import math

import numpy as np
import torch

from .base import Neighbours, StepContext
from .kernels import selection
from .kernels.block_selection import select_blocks
from .kernels.selection_reference import Selection
from .payload import Float32, Int64
from .sparse import Sparse, coder_of
from .sparsifiers import DgcOptions

# The sample: one element in a hundred, but no fewer than this, or all of them.
SAMPLED_PART = 0.01
FEWEST_SAMPLED = 1000


def _threshold(values: Float32, keep: int, context: StepContext) -> float:
    """Sampled, if the tensor is large enough for that."""
    size = max(FEWEST_SAMPLED, int(SAMPLED_PART * values.size))
    if size >= values.size:
        return selection.LEAST
    sample = np.abs(values[context.rng.integers(values.size, size=size)])
    place = size - math.ceil(size * keep / values.size)
    return max(selection.LEAST, float(np.partition(sample, place)[place]))


def _above_sampled_threshold(total: torch.Tensor, keep: int, context: StepContext) -> Selection:
    values = total.numpy()
    if values.size <= FEWEST_SAMPLED:
        return selection.select(values, keep)
    found = selection.at_least(values, _threshold(values, keep, context))
    if found.indices.size > keep:
        largest = selection.select(found.values, keep)
        return Selection(found.indices[largest.indices], largest.values)
    return found


def _each_above_its_own(values: Float32, tensors: Neighbours, keeps: Int64) -> Selection:
    lowest = np.array(
        [
            _threshold(values[start:end], keep, tensors.context(place))
            for place, ((start, end), keep) in enumerate(zip(tensors.bounds(), keeps.tolist(), strict=True))
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
