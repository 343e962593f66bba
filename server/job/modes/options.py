"""The contract of a mode's options: the questions that the server and `gc-run` ask before a job.

They ask these questions, and never which mode it is. Options can be read where there is no job, as for
--help, so they import the class that runs one only in `create`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from ....common.configuration import UsageError
from ....optim.optimizer import parse_optimizer
from ....optim.steps import OptimizerOptions
from ....settings import ServerSettings
from ..aggregation import parse_aggregation

if TYPE_CHECKING:
    from ..state import JobState
    from .mode import Mode

MAX_UINT32 = 2**32 - 1


class ModeOptions(ABC):
    """The options of one mode. Each subclass is a frozen dataclass whose fields are made with `option`."""

    __slots__ = ()

    @abstractmethod
    def create(self, state: JobState) -> Mode:
        """Create the rules of a new job with these options; they read and change `state`."""

    @property
    @abstractmethod
    def work(self) -> str:
        """Kind of work that workers are told to do, as a spec: "gradients", "local" or "exchange", with
        parameters (`worker/training/work`)."""

    @abstractmethod
    def check(self, settings: ServerSettings) -> None:
        """Raise UsageError for options of the server that conflict with these."""

    def check_workers(self, mode: str, workers: int) -> None:
        """Raise UsageError if the mode needs more than `workers` workers. No worker joins or leaves the
        job."""
        return

    def optimizer(self, settings: ServerSettings) -> tuple[OptimizerOptions, float]:
        """Return the options and the learning rate of the optimizer that the server applies."""
        return parse_optimizer(settings.optimizer), settings.learning_rate

    @property
    def workers_step(self) -> bool:
        """True if workers take the steps of the job's optimizer, and the server has no gradient."""
        return False

    @property
    def pushes_parts(self) -> bool:
        """True if workers push parts of gradients. Otherwise they exchange packets, and nothing is
        compressed."""
        return True

    @property
    def baseline(self) -> str:
        """Name of the mode to compare a run with; empty for the same mode without compression."""
        return ""

    @property
    def staleness_unit(self) -> str:
        """Unit of the staleness of a push, "versions" or "clocks"; empty where pushes of one version are
        applied together."""
        return ""

    @property
    def delay_compensation(self) -> float:
        """Factor λ of the delay compensation for versions applied since a gradient's base; 0 for none."""
        return 0.0

    @property
    def lossless(self) -> bool:
        """True if workers may only use compressors without loss."""
        return False

    @property
    def keeps_bases(self) -> bool:
        """True if a compressor may have bases (`compressors/bases`): all pushes that count are computed at
        the newest version, and hold whole tensors."""
        return False

    def steps_parts(self, settings: ServerSettings) -> bool:
        """Return True if the server may step a part of the next version while other parts are still being
        uploaded."""
        return False

    @property
    def slices(self) -> int:
        """Number of slices of each part, which the members of a group divide among themselves."""
        return 1

    @property
    def staleness_bound(self) -> int | None:
        """Number of clocks that a push may be behind; None for no bound."""
        return None


def steps_by_coordinate(settings: ServerSettings) -> bool:
    """Return True if the server is asked to step parts early, and each coordinate by itself."""
    wanted = settings.overlap == "both" and not settings.clip_norm
    return wanted and parse_aggregation(settings.aggregation).by_coordinate


def needs_mean(settings: ServerSettings) -> None:
    """Raise UsageError if `--aggregation` is not `mean`."""
    if settings.aggregation != "mean":
        raise UsageError(f"--aggregation {settings.aggregation}: not with --mode {settings.mode}; use mean")


def needs_workers(settings: ServerSettings, needed: int) -> None:
    """Raise UsageError if `--min-workers` is too small for the mode or for `--aggregation`."""
    needed = max(needed, parse_aggregation(settings.aggregation).fewest)
    if settings.min_workers < needed:
        mode = f"--mode {settings.mode}"
        if settings.aggregation != "mean":
            mode += f" with --aggregation {settings.aggregation}"
        raise UsageError(f"--min-workers {settings.min_workers}: {mode} needs at least {needed}")
