"""Runs: neighbouring tensors of a unit that one call may serve. The others are compressed one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from .base import Compressor, is_apart, is_elementwise, is_in_blocks, is_spanning
from .feedback import ErrorFeedback, without_feedback
from .parts import Unit


@dataclass(frozen=True, slots=True)
class Run:
    """Tensors from `first` up to, but not including, `last`, which one call may serve.

    how: as blocks with levels of their own; as one tensor; or as tensors of which each has its own selection.
        None if each takes a call of its own.
    """

    first: int
    last: int
    how: Literal["blocks", "elements", "neighbours"] | None


def _together(compressor: Compressor) -> Literal["blocks", "elements", "neighbours"] | None:
    inner = without_feedback(compressor)
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


def runs_of(compressors: Sequence[Compressor], unit: Unit) -> list[Run]:
    """The tensors of a unit, neighbours together where one call serves them all."""
    runs: list[Run] = []
    for place in range(unit.first, unit.last):
        together = _together(compressors[place])
        if runs and together is not None and compressors[runs[-1].first] == compressors[place]:
            runs[-1] = replace(runs[-1], last=place + 1)
        else:
            runs.append(Run(place, place + 1, together))
    return runs
