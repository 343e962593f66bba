"""The compression of a unit: each run of its tensors in its way."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..draft import Draft
from ..kernels import devices
from ..payload import AbsentPayload, Payload
from ..whole import whole_tensor
from .alone import compress_alone
from .blocks import compress_blocks
from .elements import compress_elements, compress_neighbours
from .merged import compress_merged
from .projected import compress_projected
from .runs import How, Run, split_runs

Way = Callable[[Draft, Run], list[Payload]]
WAYS: Mapping[How, Way] = {
    "blocks": compress_blocks,
    "elements": compress_elements,
    "neighbours": compress_neighbours,
}


def payloads_of(draft: Draft, unit: int) -> list[Payload]:
    """Compress all tensors of a unit; return the payloads, end to end."""
    model, starts = draft.model, draft.plan.starts
    runs = split_runs(model.runs[unit], draft.absent, draft.whole)
    merged = compress_merged(draft, runs) if draft.plan.merged else {}
    excluded = draft.absent | draft.whole
    projected = compress_projected(
        draft, [run.first for run in runs if run.how is None and run.first not in excluded]
    )
    payloads: list[Payload] = []
    for run in runs:
        start, end = starts[run.first], starts[run.last]
        if run.first in draft.absent:  # the residual stays
            draft.leave(start, end)
            payloads.append(AbsentPayload(elements=end - start))
        elif run.first in draft.whole:
            payloads += [whole_tensor(draft, index) for index in run.indices]
        elif run.first in projected:
            payloads.append(projected[run.first])
        elif run.first in merged:
            payloads += merged[run.first]
        else:
            payloads += _way(draft, run)(draft, run)
    return payloads


def _way(draft: Draft, run: Run) -> Way:
    """Return the way of a run: each tensor alone where the ledger lies on a GPU, and where one call would be
    slower."""
    if run.how is None or devices.on_gpu(draft.ledger.device):
        return compress_alone
    one = run.last - run.first == 1 if run.how == "neighbours" else draft.any_measured(run.indices)
    return compress_alone if one else WAYS[run.how]
