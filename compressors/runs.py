"""Runs: neighbouring tensors of a unit that one call compresses to one payload.

A run decodes to the same bits as its tensors would by themselves. Tensors outside runs are compressed one by
one. The method depends on the compressor:

    elements:    the compressor treats each element alike (`bf16`), and takes the run for one tensor.
    blocks:      levels are known before the gradient (`4bit`, `2bit`), and the call goes block by block.
    neighbours:  the compressor works on each tensor separately, in one kernel call for all.
                 Sparsifiers choose from each tensor (`kernels/block_selection`). Indices ascend from tensor
                 to tensor, so that one list of them serves the run, and no receiver has to know where tensors
                 begin. The coder of values has to treat each element alike. A tensor of more than
                 `sparsifiers.ALONE` elements stays by itself if one pass adds the residual and selects.
                 The compressor `8bit` joins a tensor if the last bucket before it is full, so that scales and
                 codes lie as in one tensor. In contrast, `qsgd` draws random numbers for each tensor, and has
                 no runs.
    merged:      the only method that changes the bits: see `merging`.

The downlink, where it has a compressor, uses the same runs.
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
    """Consecutive tensors that one call may serve.

    Attributes:
        first: index of the first tensor.
        last: index after the last tensor.
        how: method by which one call serves them, see the head of this file; None if each takes a call of its
            own.
    """

    first: int
    last: int
    how: How | None


def checks_alone(compressor: Compressor) -> bool:
    """Return True if compressing one tensor in a call of its own finds a gradient on the host that is not
    finite.

    A call for several tensors always finds it.
    """
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
    """Return the runs of the tensors from `first` up to, but not including, `last`.

    Args:
        chosen: compressor of each tensor.
        specs: spec of each tensor.
        first: index of the first tensor.
        last: index after the last tensor.
        merged: True if sparsifiers choose from all tensors of a unit as from one.
    """
    runs: list[Run] = []
    for index in range(first, last):
        compressor = chosen[index]
        joins = MERGED if merged and compressor.entry.merges else compressor.joins
        alike = index > first and chosen[index - 1] == compressor
        if alike and joins is not None and joins.fits(specs[index - 1].elements, specs[index].elements):
            runs[-1] = replace(runs[-1], last=index + 1)
        else:
            runs.append(Run(index, index + 1, None if joins is None else joins.how))
    return runs


def split_runs(runs: Sequence[Run], *exceptions: Set[int]) -> Sequence[Run]:
    """Return the runs, cut so that each lies in the same ones of the given sets of tensors, or outside all of
    them.

    The sets name tensors that a step treats otherwise, such as those without a gradient.
    """
    if not any(exceptions):
        return runs
    found: list[Run] = []
    for run in runs:
        for _, group in groupby(
            range(run.first, run.last), lambda index: [index in each for each in exceptions]
        ):
            indices = list(group)
            found.append(Run(indices[0], indices[-1] + 1, run.how))
    return found


def spanning(compressor: Compressor, tensors: Neighbours) -> Compressor:
    """Return a compressor for consecutive tensors laid end to end, inside `ErrorFeedback` if the given one
    is."""
    together = cast(Spanning, without_feedback(compressor)).spanning(tensors)
    return replace(compressor, compressor=together) if isinstance(compressor, ErrorFeedback) else together
