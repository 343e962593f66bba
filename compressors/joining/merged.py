"""Units from which a sparsifier chooses as from one tensor (`Plan.merged`).

All tensors of a unit to which the sparsifier applies count as one tensor, also where other tensors lie
between them. It keeps as many elements as it would keep of the single tensors in total, but may choose them
anywhere. Chosen elements travel by *stretch*, a group of tensors that lie end to end. A sparsifier whose
receiver draws the indices chooses from each stretch in proportion to its elements, on average over versions.
Each stretch then has a seed, and no index travels.

This is the only way in which a plan affects the bits. Residuals belong to elements, and merging does not move
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import cast

from ..base import Choosing
from ..cutting import cut_at
from ..draft import Draft
from ..feedback import without_feedback
from ..kernels import devices
from ..payload import Payload
from .runs import Run, checks_alone

STEPS = 1 << 16
GOLDEN = 40503  # the golden ratio times STEPS, modulo STEPS


def shares(keep: int, sizes: Sequence[int], version: int) -> list[int]:
    """Divide `keep` elements among stretches in proportion to their sizes; return the number for each
    stretch.

    Rounding differs by version, so that a stretch with less than one element of `keep` has its turn, too. No
    stretch gets more elements than it has.

    Args:
        sizes: number of elements of each stretch.
        version: version of the parameters, from 0.
    """
    total = max(1, sum(sizes))
    # Multiples of the golden ratio modulo 1 are spread evenly from 0 to 1, for any number of versions.
    turn = version * GOLDEN % STEPS * total
    starts = [(keep * before * STEPS + turn) // (total * STEPS) for before in (0, *accumulate(sizes))]
    return [end - start for start, end in pairwise(starts)]


def compress_merged(draft: Draft, runs: Sequence[Run]) -> dict[int, list[Payload]]:
    """Compress the tensors of a unit from which the sparsifier chooses as from one.

    Returns the payloads of each stretch, by index of the stretch's first tensor.
    """
    excluded = draft.absent | draft.whole
    stretches = [run for run in runs if run.how == "merged" and run.first not in excluded]
    if not stretches:
        return {}
    inner = cast(Choosing, without_feedback(draft.model.compressors[stretches[0].first]))
    keep = sum(
        inner.keep(draft.model.specs[index].elements, draft.context(index))
        for run in stretches
        for index in run.indices
    )
    if not inner.seeded:
        return _chosen(draft, stretches, keep)
    starts, found = draft.plan.starts, dict[int, list[Payload]]()
    sizes = [starts[run.last] - starts[run.first] for run in stretches]
    for run, share in zip(stretches, shares(keep, sizes, draft.terms.version), strict=True):
        found.update(_chosen(draft, [run], share))
    return found


def _chosen(draft: Draft, stretches: Sequence[Run], keep: int) -> dict[int, list[Payload]]:
    """Choose `keep` elements from these stretches as from one tensor; return the payloads of each stretch.

    State and random numbers are those of the first tensor.
    """
    first, starts = stretches[0].first, draft.plan.starts
    indices = [index for run in stretches for index in run.indices]
    compressor, gradient = draft.model.compressors[first], draft.gradients[first]
    if len(indices) > 1:
        gradient = draft.joined(indices)
    known = checks_alone(compressor) or all(index in draft.magnitudes for index in indices)
    if not (known or devices.finite(gradient)):
        draft.blame(indices)
    ranges = [(starts[run.first], starts[run.last]) for run in stretches]
    context = replace(draft.context(first), keep=keep, magnitudes=None)
    payload = draft.compress_as_one(indices, compressor, gradient, ranges, context)
    borders = [0, *accumulate(end - start for start, end in ranges)]
    return {run.first: each for run, each in zip(stretches, cut_at(payload, borders), strict=True)}
