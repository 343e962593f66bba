"""Runs: neighbouring tensors of a unit that one call compresses.

Tensors outside runs are compressed alone, those of `lowrank` all in one call (`projected`).

Of `neighbours`, sparsifiers choose from each tensor (`kernels/block_selection`). Indices ascend from tensor
to tensor, so that one list of them serves the run, and no receiver has to know where tensors begin. The coder
of values has to treat each element alike. A tensor of more than `sparsifiers.ALONE` elements stays by itself
if one pass adds the residual and selects.

`8bit` joins a tensor if the last bucket before it is full: scales and codes then lie as in one tensor. `qsgd`
draws random numbers for each tensor, and has no runs.

The downlink, where it has a compressor, uses the same runs.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from itertools import groupby
from typing import cast

from ..base import Compressor, Neighbours, Spanning, TensorSpec, is_out_of_place
from ..entry import How as How
from ..entry import Joined
from ..feedback import ErrorFeedback, without_feedback
from ..registry import CompressorSpec

MERGED = Joined(how="merged")


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive tensors that one call may serve.

    Attributes:
        last: index after the last tensor.
        how: way in which one call serves them; None for a tensor outside runs.
    """

    first: int
    last: int
    how: How | None

    @property
    def indices(self) -> range:
        return range(self.first, self.last)


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
    """Group neighbouring tensors into runs that one call each can compress; return the runs, in manifest
    order.

    Args:
        chosen: compressor of each tensor of the model.
        specs: spec of each tensor of the model.
        first: index of the first tensor to group.
        last: index after the last tensor to group.
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
    """Split runs so that all tensors of a run are in the same of the given sets, or all in none; return the
    runs.

    exceptions: sets of indices of tensors that a step handles separately, such as those without a gradient.
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
