"""Options of the mode `async`: pushes are applied as they arrive (`arrivals`), at any staleness."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ....common.configuration import UsageError, option
from ....optim.optimizer import parse_optimizer
from ....settings import ServerSettings
from .options import ModeOptions, needs_mean

if TYPE_CHECKING:
    from ..state import JobState
    from .mode import Mode


@dataclass(frozen=True, kw_only=True, slots=True)
class AsyncOptions(ModeOptions):
    """Every gradient becomes a version as soon as it arrives."""

    rate: Literal["full", "inverse"] = option(
        "full", "weight of a gradient: full, or inverse: divided by the versions applied since its base"
    )
    compensation: float = option(
        0.0, "lambda of the compensation for versions applied since the base; 0 for none", least=0
    )

    def create(self, state: JobState) -> Mode:
        from .arrivals import Arrivals

        inverse, compensated = self.rate == "inverse", self.compensation > 0
        return Arrivals(state, bound=self.staleness_bound, inverse=inverse, compensated=compensated)

    @property
    def work(self) -> str:
        return "gradients:single=on"

    @property
    def staleness_unit(self) -> str:
        return "versions"

    @property
    def delay_compensation(self) -> float:
        return self.compensation

    def check(self, settings: ServerSettings) -> None:
        needs_mean(settings)
        if self.rate == "inverse" and parse_optimizer(settings.optimizer).undoes_weights:
            raise UsageError(
                f"--mode {settings.mode}: weights gradients, and --optimizer {settings.optimizer} is "
                "independent of their magnitude; use sgd"
            )
