"""The contract of a mode's options: the questions that the server and `gc-run` ask before a job.

They ask these, and never which mode it is. Options do not know the class that runs a job (`registry` makes it
from them), so that they can be read where there is no job, as for --help.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from ....common.configuration import UsageError
from ....optim.optimizer import parse_optimizer
from ....optim.steps import OptimizerOptions
from ....settings import ServerSettings
from ..aggregation import parse_aggregation

MAX_UINT32 = 2**32 - 1


class ModeOptions(ABC):
    """A frozen dataclass of the options of one mode, made with `option`."""

    __slots__ = ()

    @property
    @abstractmethod
    def work(self) -> str:
        """The kind of work that workers are told to do, as a spec with parameters."""

    @abstractmethod
    def check(self, settings: ServerSettings) -> None:
        """Raise UsageError for options of the server that do not go with these."""

    def check_workers(self, mode: str, workers: int) -> None:
        """Raise UsageError if so many workers, which do not change, are not enough. mode: as it was given."""
        return

    def optimizer(self, settings: ServerSettings) -> tuple[OptimizerOptions, float]:
        """The server's, and its learning rate."""
        return parse_optimizer(settings.optimizer), settings.learning_rate

    @property
    def workers_step(self) -> bool:
        """Whether workers take the steps of the job's optimizer, and the server has no gradient."""
        return False

    @property
    def pushes_parts(self) -> bool:
        """Whether workers push parts of gradients, as `Mode.pushes_parts`; if not, nothing is compressed."""
        return True

    @property
    def baseline(self) -> str:
        """The mode to compare a run with; empty for the same mode without compression."""
        return ""

    @property
    def staleness_unit(self) -> str:
        """Unit of the age of a push; empty where pushes of one version are applied together."""
        return ""

    @property
    def delay_compensation(self) -> float:
        """λ of the correction for versions applied since a gradient's base."""
        return 0.0

    @property
    def lossless(self) -> bool:
        """Whether workers may only use compressors without loss."""
        return False

    def steps_parts(self, settings: ServerSettings) -> bool:
        """Whether a part of the next version may be made while others are on their way up."""
        return False

    @property
    def slices(self) -> int:
        """Number of slices of each part, which the members of a group divide among themselves."""
        return 1

    @property
    def staleness_bound(self) -> int | None:
        """Clocks that a push may be behind; None for no bound."""
        return None


def needs_mean(settings: ServerSettings) -> None:
    """Raise UsageError for another aggregation."""
    if settings.aggregation != "mean":
        raise UsageError(f"--aggregation {settings.aggregation}: not with --mode {settings.mode}; use mean")


def needs_workers(settings: ServerSettings, needed: int) -> None:
    """Raise UsageError if a job may begin with fewer, or with fewer than its aggregation needs."""
    needed = max(needed, parse_aggregation(settings.aggregation).fewest)
    if settings.min_workers < needed:
        what = f"--mode {settings.mode}"
        if settings.aggregation != "mean":
            what += f" with --aggregation {settings.aggregation}"
        raise UsageError(f"--min-workers {settings.min_workers}: {what} needs at least {needed}")
