"""The modes by name, and their options: `--mode stale:bound=4`.

Imports neither torch nor grpc, so that `gc-server --help` answers at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from ....configuration import UsageError, option, options_of, parse_named
from ....optimizer import OptimizerOptions, parse_optimizer
from ....settings import ServerSettings
from ...shard.aggregation import parse_aggregation
from .interval import Adaptive, Fixed, LocalSteps

MAX_UINT32 = 2**32 - 1


def _averages(settings: ServerSettings) -> None:
    if settings.aggregation != "mean":
        raise UsageError(f"--aggregation {settings.aggregation}: not with --mode {settings.mode}; use mean")


def _has_workers(settings: ServerSettings, needed: int) -> None:
    if settings.min_workers < needed:
        what = f"--mode {settings.mode} with --aggregation {settings.aggregation}"
        raise UsageError(f"--min-workers {settings.min_workers}: {what} needs at least {needed}")


def _parse_copies(text: str) -> None:
    if text != "auto" and not (text.isascii() and text.isdigit() and 1 <= int(text) <= MAX_UINT32):
        raise ValueError(f"expected a whole number from 1, or auto, got {text!r}")


def _parse_steps(text: str) -> None:
    if text != "adaptive":
        if not (text.isascii() and text.isdigit()):
            raise ValueError(f"expected a whole number, or adaptive, got {text!r}")
        Fixed(steps=int(text))


def parse_outer(text: str) -> OptimizerOptions:
    """An optimizer inside of a spec, where slashes stand for the colon and the commas."""
    return parse_optimizer(text.replace("/", ":", 1).replace("/", ","))


@dataclass(frozen=True, kw_only=True, slots=True)
class Sync:
    """Rounds: the gradients of all workers at one version make the next.

    Every mode has `work`, the kind of work that workers are told to do, as a spec with parameters; and
    `check`, which raises UsageError for options of the server that do not go with the mode's.
    """

    work: ClassVar[str] = "gradients"

    backup: int = option(0, "stragglers that a round may close without", least=0, most=MAX_UINT32)
    redundancy: int = option(
        1,
        "workers that compute the same samples; each pushes a slice of every tensor",
        least=1,
        most=MAX_UINT32,
    )
    stragglers: int = option(
        0,
        "stragglers that a round may close without, because others compute their samples too",
        least=0,
        most=MAX_UINT32,
    )

    def __post_init__(self) -> None:
        asked = [f"redundancy={self.redundancy}"] if self.redundancy > 1 else []
        asked += [f"stragglers={self.stragglers}"] if self.stragglers else []
        if len(asked) > 1:
            why = "the one saves bytes, the other waiting: choose"
            raise ValueError(f"{asked[1]}: not with {asked[0]}; {why}")
        if asked and self.backup:
            why = "rounds would close without slices that nobody else pushes"
            if self.stragglers:
                why = "such a round already closes without as many, and loses nothing by it"
            raise ValueError(f"{asked[0]}: not with backup={self.backup}: {why}")

    def check(self, settings: ServerSettings) -> None:
        if self.redundancy > 1 or self.stragglers:
            _averages(settings)
        needed = self.backup + parse_aggregation(settings.aggregation).fewest
        _has_workers(settings, max(needed, self.stragglers + 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class Asynchronous:
    """Every gradient becomes a version as soon as it is there."""

    work: ClassVar[str] = "gradients:single=on"

    rate: Literal["full", "inverse"] = option(
        "full", "rate of a gradient: full, or inverse, divided by the versions applied since its base"
    )
    compensation: float = option(0.0, "lambda of the correction for those versions; 0 for none", least=0)

    def check(self, settings: ServerSettings) -> None:
        _averages(settings)
        if self.rate == "inverse" and parse_optimizer(settings.optimizer).undoes_weights:
            raise UsageError(
                f"--mode {settings.mode}: weighs gradients, and --optimizer {settings.optimizer} takes no "
                "notice of how large they are; use sgd"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Stale(Asynchronous):
    """As async, and no worker runs away from the slowest."""

    bound: int = option(
        4, "clocks that a worker may be ahead of the slowest when it begins a step", least=0, most=MAX_UINT32
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Local:
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
        parse=parse_outer,
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

    def check(self, settings: ServerSettings) -> None:
        _has_workers(settings, parse_aggregation(settings.aggregation).fewest)


@dataclass(frozen=True, kw_only=True, slots=True)
class Coded:
    """Workers exchange coded packets of gradients, and each takes the step itself."""

    work: ClassVar[str] = "exchange"

    redundancy: str = option(
        "1", "workers that compute each block; auto chooses by measured times", parse=_parse_copies
    )

    @property
    def copies(self) -> int | None:
        """Of each block; None to choose them by measured times."""
        return None if self.redundancy == "auto" else int(self.redundancy)

    def check(self, settings: ServerSettings) -> None:
        _averages(settings)
        if settings.downlink != "none":
            raise UsageError(
                f"--downlink {settings.downlink}: --mode {settings.mode} has no updates; use none"
            )


AnyMode = Sync | Stale | Asynchronous | Local | Coded
MODES: Mapping[str, type[AnyMode]] = {
    "sync": Sync,
    "stale": Stale,
    "async": Asynchronous,
    "local": Local,
    "coded": Coded,
}


def parse(text: str) -> AnyMode:
    """The options of the mode that is named. Raises SpecError, which lists what is known."""
    return parse_named("mode", text, MODES)


def describe() -> str:
    """Every mode with its options and their defaults, for --help."""
    lines = ["", "modes and their options:"]
    for name, mode in MODES.items():
        keys = [f"{key}={each.default_text}" for key, each in options_of(mode).items()]
        lines.append(f"  {name}:{','.join(keys)}")
    return "\n".join(lines)
