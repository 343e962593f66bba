"""What every mode's options have in common. A mode's own file has the options and makes the mode."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from ....configuration import UsageError
from ....optimizer import parse_optimizer
from ....settings import ServerSettings
from ....steps import OptimizerOptions
from ...shard.aggregation import parse_aggregation

if TYPE_CHECKING:
    from ..state import JobState
    from .mode import Mode

MAX_UINT32 = 2**32 - 1


class ModeOptions(ABC):
    """A frozen dataclass of the options of one mode, made with `option`."""

    __slots__ = ()

    @property
    @abstractmethod
    def work(self) -> str:
        """The kind of work that workers are told to do, as a spec with parameters."""

    @abstractmethod
    def mode(self, state: JobState) -> Mode:
        """The mode of a new job."""

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
        """That members of a group may divide the parts of the model among themselves in."""
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
