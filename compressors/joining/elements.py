"""Runs that are compressed as one tensor: each element alike, or each tensor by its own statistics."""

from __future__ import annotations

import numpy as np

from ..base import Compressor, Neighbours
from ..draft import Draft
from ..kernels import devices
from ..payload import DenseFormat, DensePayload, Payload
from ..tensors import LOSSLESS
from .runs import Run, spanning


def compress_neighbours(draft: Draft, run: Run) -> list[Payload]:
    """Compress each tensor of a run by its own statistics, in one kernel call."""
    sizes = np.array([draft.model.specs[index].elements for index in run.indices], np.int64)
    tensors = Neighbours(sizes, lambda index: draft.context(run.first + index))
    return _as_one(draft, run, spanning(draft.model.compressors[run.first], tensors))


def compress_elements(draft: Draft, run: Run) -> list[Payload]:
    """Compress a run whose elements are all treated alike."""
    return _as_one(draft, run, draft.model.compressors[run.first])


def _as_one(draft: Draft, run: Run, compressor: Compressor) -> list[Payload]:
    start, end = draft.plan.starts[run.first], draft.plan.starts[run.last]
    gradient = draft.joined(run.indices)
    if not devices.finite(gradient):
        draft.blame(run.indices)
    if compressor == LOSSLESS:  # the copy of the gradients is the payload
        if draft.kept:
            devices.add_to(gradient, draft.ledger.residual[start:end])
            draft.ledger.draft[start:end].zero_()
        data = gradient.numpy().view(np.uint8)
        return [DensePayload(format=DenseFormat.FLOAT32, elements=end - start, data=data)]
    given = compressor, gradient, [(start, end)], draft.context(run.first)
    return [draft.compress_as_one(run.indices, *given)]
