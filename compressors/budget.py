"""Clipping, and budgets for the whole model: both need all gradients of a step before any is compressed."""

from __future__ import annotations

import math
from typing import cast

import torch

from .base import ModelWide
from .draft import Draft
from .feedback import ErrorFeedback, without_feedback
from .kernels import devices
from .ledger import norm


def prepare(draft: Draft) -> None:
    """Clip all gradients, and divide the budget of elements among them, as far as options ask for it."""
    if draft.model.wrapping.clip:
        _clip(draft)
    if draft.model.planned and draft.compresses:
        _divide(draft)


def _clip(draft: Draft) -> None:
    length = math.hypot(*(norm(draft.gradients[index]) for index in sorted(draft.gradients)))
    largest = draft.model.wrapping.clip / math.sqrt(draft.terms.workers)
    factor = largest / length if length > largest else 1.0
    for index, gradient in draft.gradients.items():
        draft.gradients[index] = gradient * factor
        draft.magnitudes[index] = devices.magnitudes(draft.gradients[index])


def _divide(draft: Draft) -> None:
    """Let the compressor divide its budget among gradients plus residuals, which the draft holds
    afterwards."""
    model, totals = draft.model, list[torch.Tensor]()
    planned = [index for index in model.planned if index in draft.gradients and index not in draft.whole]
    if not planned:
        return
    for index in planned:
        compressor, gradient = model.compressors[index], draft.gradients[index]
        ranges = [draft.range_of(index)]
        if isinstance(compressor, ErrorFeedback):
            state = draft.ledger.opened(ranges, gradient.device, draft.states[index])
            added = compressor.accumulate(gradient, state)
            if added is not gradient:  # the velocity
                draft.magnitudes[index] = devices.magnitudes(added)
            draft.ledger.write_back(ranges, state)
            totals.append(state.residual)
        else:
            total = draft.plus_residual(gradient, ranges)
            if total is not gradient:
                draft.gradients[index], draft.magnitudes[index] = total, devices.magnitudes(total)
            totals.append(total)
    planner = cast(ModelWide, without_feedback(model.compressors[planned[0]]))
    found = planner.plan(totals, [model.specs[index] for index in planned], draft.context(planned[0]))
    draft.keep = dict(zip(planned, found, strict=True))
