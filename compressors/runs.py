"""Runs: neighbouring tensors of a unit that one call compresses to one payload. Others are compressed one by
one. A run decodes to the bits that its tensors would decode to alone. How, depends on the compressor:

    elements    the compressor treats elements alike (`bf16`), and takes the run for one tensor
    blocks      levels are known before the gradient (`4bit`, `2bit`), and the call goes block by block
    neighbours  sparsifiers choose from each tensor by itself, in one kernel call for all
                (`kernels/block_selection`). Indices ascend from tensor to tensor, so that one list of them
                serves the run, and no receiver has to know where tensors begin. The coder of values has to
                treat elements alike. A tensor of more than `sparsifiers.ALONE` elements stays by itself where
                one pass adds the residual and selects. `8bit` joins a tensor where the last bucket before it
                is full, so that scales and codes lie as in one tensor; `qsgd` draws for each by itself
    merged      the one way that changes the bits: see `merging`

Where the downlink has a compressor it goes by the same runs.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from itertools import groupby
from typing import cast

from .base import Compressor, Neighbours, Spanning, TensorSpec, is_out_of_place
from .entry import How, Joined
from .feedback import ErrorFeedback, without_feedback
from .registry import CompressorSpec

MERGED = Joined(how="merged")


@dataclass(frozen=True, slots=True)
class Run:
    """Tensors from `first` up to, but not including, `last`, which one call may serve.

    how: as blocks with levels of their own; as one tensor; as tensors of which each has its own statistics
        (`base.Spanning`); or as one tensor with others of the unit too (`merging`). None if each takes a call
        of its own.
    """

    first: int
    last: int
    how: How | None


def checks_alone(compressor: Compressor) -> bool:
    """Whether a gradient on the host that is not finite is found while it is compressed in a call of its
    own; in a call for several it always is."""
    return (
        isinstance(compressor, ErrorFeedback) and is_out_of_place(compressor.compressor) and compressor.plain
    )


def runs_of(
    chosen: Sequence[CompressorSpec],
    specs: Sequence[TensorSpec],
    first: int,
    last: int,
    *,
    merged: bool = False,
) -> list[Run]:
    """The tensors from `first` up to, but not including, `last`, neighbours together where one call serves
    them all. chosen: by tensor, its compressor. merged: as `Plan.merged`."""
    runs: list[Run] = []
    for place in range(first, last):
        compressor = chosen[place]
        joins = MERGED if merged and compressor.entry.merges else compressor.joins
        alike = place > first and chosen[place - 1] == compressor
        if alike and joins is not None and joins.fits(specs[place - 1].elements, specs[place].elements):
            runs[-1] = replace(runs[-1], last=place + 1)
        else:
            runs.append(Run(place, place + 1, None if joins is None else joins.how))
    return runs


def present(runs: Sequence[Run], *apart: Set[int]) -> Sequence[Run]:
    """Return the same, cut around tensors that are gone through otherwise: neighbours that are in the same of
    these sets, or in none, are runs of their own."""
    if not any(apart):
        return runs
    found: list[Run] = []
    for run in runs:
        for _, group in groupby(range(run.first, run.last), lambda place: [place in each for each in apart]):
            places = list(group)
            found.append(Run(places[0], places[-1] + 1, run.how))
    return found


def spanning(compressor: Compressor, tensors: Neighbours) -> Compressor:
    """The compressor of neighbours as one tensor, feedback included."""
    together = cast(Spanning, without_feedback(compressor)).spanning(tensors)
    return replace(compressor, compressor=together) if isinstance(compressor, ErrorFeedback) else together
