"""`gcac`: drop the elements near the centroid of a tensor's gradient, keep the k elements farthest from it.

Source: the thesis on near-centroid and k-reciprocal gradient compression, chapter 3 (GCAC). Its approximate
centroid is the element with the least summed distance to all others, found by comparing every pair. For
numbers that element is the median: the sum of |x - c| falls towards the middle of the sorted values from both
sides. One exact selection of the median, and one of the largest |r - median|, therefore give the result that
the paper computes in O(d^2); a test compares the two. Of an even number of elements both middle ones qualify;
we take the lower.

With error feedback this has a weakness: an element that was sent is 0 in the residual. Where the median is
not near 0, that is far from the median, and the element is chosen again. Gradients usually have a median near
0; a tensor of equal values does not.
"""

from __future__ import annotations

import numpy as np
import torch

from .base import Neighbours, StepContext
from .kernels import devices, selection
from .kernels.block_selection import select_blocks
from .kernels.shared import Selection
from .payload import Float32, Int64
from .sparse import Sparse, coder_of
from .sparsifiers import SparseOptions


def _far_from_median(total: torch.Tensor, keep: int, context: StepContext) -> Selection:
    """Choose the `keep` elements farthest from the median."""
    center = devices.median(total) if total.numel() else 0.0
    return devices.select(total, keep, center=center)


def _each_far_from_its_median(values: Float32, tensors: Neighbours, keeps: Int64) -> Selection:
    """Choose from each of several tensors the elements farthest from its median."""
    blocks = [values[start:end] for start, end in tensors.bounds()]
    centers = np.array([selection.median(block) if block.size else 0.0 for block in blocks], np.float32)
    # Zeros are not worth sending, unless they are far from the median.
    lowest = np.where(centers == 0, np.float32(selection.LEAST), np.float32(0.0))
    return select_blocks(values, tensors.sizes, keeps, lowest, centers)


def near_centroid(options: SparseOptions) -> Sparse:
    return Sparse(
        options=options,
        coder=coder_of(options.values),
        select=_far_from_median,
        select_each=_each_far_from_its_median,
    )
