"""A call for each tensor."""

from __future__ import annotations

from ..draft import Draft
from ..payload import Payload
from .runs import Run, checks_alone


def compress_alone(draft: Draft, run: Run) -> list[Payload]:
    model, payloads = draft.model, list[Payload]()
    for index in run.indices:
        compressor = model.compressors[index]
        if index not in draft.magnitudes and not checks_alone(compressor):
            draft.measure(index)
        given = compressor, draft.gradients[index], [draft.range_of(index)], draft.context(index)
        payloads.append(draft.compress_as_one([index], *given))
    return payloads
