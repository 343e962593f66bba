"""Options of the mode `async`: pushes are applied as they arrive (`arrivals`), however old they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ....common.configuration import UsageError, option
from ....optim.optimizer import parse_optimizer
from ....settings import ServerSettings
from .options import ModeOptions, needs_mean


@dataclass(frozen=True, kw_only=True, slots=True)
class AsyncOptions(ModeOptions):
    """Every gradient becomes a version as soon as it is there."""

    rate: Literal["full", "inverse"] = option(
        "full", "rate of a gradient: full, or inverse, divided by the versions applied since its base"
    )
    compensation: float = option(0.0, "lambda of the correction for those versions; 0 for none", least=0)

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
                f"--mode {settings.mode}: weighs gradients, and --optimizer {settings.optimizer} takes no "
                "notice of how large they are; use sgd"
            )
