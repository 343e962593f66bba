"""The mode `local`: rounds (`rounds`) of as many local steps as `interval` says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ....configuration import option
from ....optimizer import OptimizerOptions, parse_optimizer
from ....settings import ServerSettings
from .interval import Adaptive, Fixed, LocalSteps
from .options import ModeOptions, needs_workers
from .sync import SyncOptions

if TYPE_CHECKING:
    from ..state import JobState
    from .rounds import Rounds


def _parse_steps(text: str) -> None:
    if text != "adaptive":
        if not (text.isascii() and text.isdigit()):
            raise ValueError(f"expected a whole number, or adaptive, got {text!r}")
        Fixed(steps=int(text))


def _parse_outer(text: str) -> OptimizerOptions:
    """An optimizer inside of a spec, where slashes stand for the colon and the commas."""
    return parse_optimizer(text.replace("/", ":", 1).replace("/", ","))


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalOptions(ModeOptions):
    """Rounds of several local steps each, whose changes are averaged."""

    steps: str = option("adaptive", "local steps of a round, a number or adaptive", parse=_parse_steps)
    first: int = option(4, "adaptive steps of the first round", least=1)
    most: int = option(16, "limit of adaptive steps", least=1)
    correction: float = option(
        0.1, "part of the way back to the global model that each step takes", least=0, most=1
    )
    outer: str = option(
        "sgd",
        "optimizer that is applied to the mean change, such as sgd/momentum=0.9/nesterov=on",
        parse=_parse_outer,
    )
    outer_rate: float = option(1.0, "learning rate of the outer optimizer", least=0)

    def __post_init__(self) -> None:
        Adaptive(first=self.first, most=self.most)  # raises for numbers that do not go together

    @property
    def work(self) -> str:
        return f"local:correction={self.correction!r}"

    @property
    def interval(self) -> LocalSteps:
        if self.steps == "adaptive":
            return Adaptive(first=self.first, most=self.most)
        return Fixed(steps=int(self.steps))

    def mode(self, state: JobState) -> Rounds:
        from .rounds import Rounds  # late: options are read where there is no job, as for --help

        return Rounds(state, SyncOptions(), self.interval)

    def check(self, settings: ServerSettings) -> None:
        needs_workers(settings, 1)

    def optimizer(self, settings: ServerSettings) -> tuple[OptimizerOptions, float]:
        return _parse_outer(self.outer), self.outer_rate
