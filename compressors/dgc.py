"""`dgc`: deep gradient compression, a sparsifier that estimates its threshold from a sample.

Source: Lin et al., "Deep Gradient Compression" (ICLR 2018). Its parts and where they are:

    sampled threshold       here: the k-th part of a random sample; if more than k elements exceed it, the
                            largest k of those are taken (the paper's hierarchical selection). Fewer are sent
                            as they are
    momentum correction     `momentum`, with masking, in `feedback`; the server takes plain SGD steps
    local clipping          `clip`, in `model`
    warm-up                 `warmup` epochs, in `sparse.SparseOptions`; the learning rate's is the server's
                            schedule (`--schedule constant:warmup=4`)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from .base import StepContext
from .kernels import selection
from .kernels.selection_reference import Selection
from .sparse import Sparse, SparseOptions

# The sample: one element in a hundred, but no fewer than this, or all of them.
SAMPLED_PART = 0.01
FEWEST_SAMPLED = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class DgcOptions(SparseOptions):
    """As of every sparsifier, with the paper's four epochs of warm-up."""

    warmup: int = 4


def _above_sampled_threshold(total: torch.Tensor, keep: int, context: StepContext) -> Selection:
    values, elements = total.numpy(), total.numel()
    size = max(FEWEST_SAMPLED, int(SAMPLED_PART * elements))
    if size >= elements:
        return selection.select(values, keep)
    sample = np.abs(values[context.rng.integers(elements, size=size)])
    place = size - math.ceil(size * keep / elements)
    found = selection.at_least(values, max(selection.LEAST, float(np.partition(sample, place)[place])))
    if found.indices.size > keep:
        largest = selection.select(found.values, keep)
        return Selection(found.indices[largest.indices], largest.values)
    return found


def dgc(options: DgcOptions) -> Sparse:
    return Sparse(options=options, coder=options.values.coder(), select=_above_sampled_threshold)
