"""Quantizers whose levels are known before the gradient: one pass over the run, with a block for each
tensor."""

from __future__ import annotations

from typing import cast

import numpy as np

from ..base import InBlocks, NonFiniteGradient
from ..draft import Draft
from ..feedback import without_feedback
from ..payload import Payload
from .runs import Run


def compress_blocks(draft: Draft, run: Run) -> list[Payload]:
    """Return the payload of a run. The sums of the pass show a gradient that is not finite."""
    model, ledger, starts = draft.model, draft.ledger, draft.plan.starts
    start, end = starts[run.first], starts[run.last]
    compressor = cast(InBlocks, without_feedback(model.compressors[run.first]))
    payload, states, totals = compressor.compress_blocks(
        [draft.gradients[index] for index in run.indices],
        ledger.residual[start:end],
        ledger.draft[start:end],
        draft.states[run.first : run.last],
        draft.terms.samples,
    )
    finite = np.isfinite(totals)
    if not finite.all():
        raise NonFiniteGradient(model.specs[run.first + int(np.argmin(finite))].name)
    draft.states[run.first : run.last] = states
    return [payload]
