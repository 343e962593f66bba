"""Tensors that are sent whole, as float32 with all of their residual: spikes, and a worker's last push."""

from __future__ import annotations

from collections.abc import Sequence, Set

import torch

from ..common.parts import Unit
from .cutting import join
from .dense import dense_payload
from .draft import Draft
from .kernels import devices
from .payload import AbsentPayload, DenseFormat, Payload


def whole_tensor(draft: Draft, index: int) -> Payload:
    """Return a tensor with all of its residual and velocity; nothing of it stays in the ledger, except for
    the velocity with masking=off."""
    start, end = draft.range_of(index)
    ledger, gradient, wrapping = draft.ledger, draft.gradients[index], draft.model.wrapping
    if ledger.velocity is not None and ledger.draft_velocity is not None:
        velocity = ledger.velocity[start:end].to(gradient.device)
        gradient = devices.saturate(torch.add(gradient, velocity, alpha=wrapping.momentum))
        if wrapping.masking:
            ledger.draft_velocity[start:end].zero_()  # all of it has been sent
        else:
            ledger.draft_velocity[start:end].copy_(gradient)
    total = devices.saturate(gradient + ledger.residual[start:end].to(gradient.device))
    ledger.draft[start:end].zero_()
    return dense_payload(DenseFormat.FLOAT32, total.cpu().numpy())


def flushed(draft: Draft, unit: Unit, unwanted: Sequence[int]) -> dict[int, list[Payload]]:
    """Return all that the draft holds of a unit, by number of the part; the draft is 0 afterwards.

    A tensor is sent or absent as a whole, which makes the result independent of cuts. unwanted: parts in
    which only tensors that had a residual before the step are sent.
    """
    tensors, before = range(unit.first, unit.last), draft.ledger.residual
    owed = {index for index in tensors if before[slice(*draft.range_of(index))].any()}
    there = owed | (set(tensors) - draft.absent)
    return {
        part: _flushed_part(draft, unit, part, owed if part in unwanted else there) for part in unit.parts
    }


def _flushed_part(draft: Draft, unit: Unit, part: int, sent: Set[int]) -> list[Payload]:
    """Return all that the draft holds of a part. sent: tensors that are sent; the others are marked
    absent."""
    bounds, payloads = draft.plan.parts[part], list[Payload]()
    for index in range(unit.first, unit.last):
        start, end = draft.range_of(index)
        values = draft.ledger.draft[max(bounds.start, start) : min(bounds.end, end)].cpu().numpy()
        if index in sent:
            payloads.append(dense_payload(DenseFormat.FLOAT32, values))
        else:
            payloads.append(AbsentPayload(elements=values.size))
    draft.ledger.draft[bounds.start : bounds.end].zero_()
    return join(each for each in payloads if each.elements)
