"""Options of the mode `stale`: like `async`, with a bound on how far apart members may be (`arrivals`)."""

from __future__ import annotations

from dataclasses import dataclass

from ....common.configuration import option
from .asynchronous import AsyncOptions
from .options import MAX_UINT32


@dataclass(frozen=True, kw_only=True, slots=True)
class StaleOptions(AsyncOptions):
    """Like `async`, with a bound on how far a worker may be ahead of the slowest."""

    bound: int = option(
        4, "clocks that a worker may be ahead of the slowest when it begins a step", least=0, most=MAX_UINT32
    )

    @property
    def staleness_unit(self) -> str:
        return "clocks"

    @property
    def staleness_bound(self) -> int:
        return self.bound
