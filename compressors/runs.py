"""Runs: neighbouring tensors of a unit that one call compresses to one payload. Others are compressed one by
one. A run decodes to the bits that its tensors would decode to alone. How, depends on the compressor:

    elements    the compressor treats elements alike (`bf16`), and takes the run for one tensor
    blocks      levels are known before the gradient (`4bit`, `2bit`), and the call goes block by block
    neighbours  sparsifiers choose from each tensor by itself, in one kernel call for all
                (`kernels/block_selection`). Indices ascend from tensor to tensor, so that one list of them
                serves the run, and no receiver has to know where tensors begin. The coder of values has to
                treat elements alike. A tensor of more than `sparse.ALONE` elements stays by itself where one
                pass adds the residual and selects. `8bit` joins a tensor where the last bucket before it is
                full, so that scales and codes lie as in one tensor; `qsgd` draws for each by itself
    merged      the one way that changes the bits: see `merging`

Where the downlink has a compressor it goes by the same runs.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

from .base import (
    Compressor,
    Neighbours,
    TensorSpec,
    is_apart,
    is_choosing,
    is_elementwise,
    is_in_blocks,
    is_spanning,
)
from .feedback import ErrorFeedback, without_feedback

How = Literal["blocks", "elements", "neighbours", "merged"]


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


def _together(compressor: Compressor, *, merged: bool = False) -> How | None:
    inner = without_feedback(compressor)
    if merged and is_choosing(inner):
        return "merged"
    if is_elementwise(inner):
        return "elements"
    if is_spanning(inner):
        return "neighbours"
    if isinstance(compressor, ErrorFeedback) and is_in_blocks(inner) and compressor.plain:
        return "blocks"
    return None


def checks(compressor: Compressor) -> bool:
    """Whether a gradient on the host that is not finite is found while it is compressed."""
    return _together(compressor) is not None or checks_alone(compressor)


def checks_alone(compressor: Compressor) -> bool:
    """Whether it is also where a tensor takes a call of its own."""
    return isinstance(compressor, ErrorFeedback) and is_apart(compressor.compressor) and compressor.plain


def runs_of(
    compressors: Sequence[Compressor],
    specs: Sequence[TensorSpec],
    first: int,
    last: int,
    *,
    merged: bool = False,
) -> list[Run]:
    """The tensors from `first` up to, but not including, `last`, neighbours together where one call serves
    them all. merged: as `Plan.merged`."""
    runs: list[Run] = []
    for place in range(first, last):
        together = _together(compressors[place], merged=merged)
        if runs and together is not None and compressors[runs[-1].first] == compressors[place]:
            inner = without_feedback(compressors[place])
            elements = specs[place - 1].elements, specs[place].elements
            if together != "neighbours" or not is_spanning(inner) or inner.goes_on(*elements):
                runs[-1] = replace(runs[-1], last=place + 1)
                continue
        runs.append(Run(place, place + 1, together))
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
    """The compressor of a run as one tensor, feedback included."""
    inner = without_feedback(compressor)
    if not is_spanning(inner):
        return compressor
    together = inner.spanning(tensors)
    return replace(compressor, compressor=together) if isinstance(compressor, ErrorFeedback) else together
