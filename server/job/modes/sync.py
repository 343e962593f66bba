"""Options of the mode `sync`: rounds of one step (`rounds`), divided as these say (`division`)."""

from __future__ import annotations

from dataclasses import dataclass

from ....common.configuration import UsageError, option
from ....settings import ServerSettings
from ..aggregation import parse_aggregation
from .options import MAX_UINT32, ModeOptions, needs_mean, needs_workers


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncOptions(ModeOptions):
    """Rounds: the gradients of all workers at one version make the next."""

    backup: int = option(0, "stragglers that a round may close without", least=0, most=MAX_UINT32)
    redundancy: int = option(
        1,
        "workers that compute the same samples; each pushes other parts of the model",
        least=1,
        most=MAX_UINT32,
    )
    stragglers: int = option(
        0,
        "stragglers that a round may close without, because others compute their samples too",
        least=0,
        most=MAX_UINT32,
    )

    @property
    def work(self) -> str:
        return "gradients"

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

    def steps_parts(self, settings: ServerSettings) -> bool:
        plain = not self.backup and self.redundancy == 1 and not self.stragglers
        wanted = settings.overlap == "both" and plain and not settings.clip_norm
        return wanted and parse_aggregation(settings.aggregation).by_coordinate

    @property
    def slices(self) -> int:
        return self.redundancy

    @property
    def lossless(self) -> bool:
        return self.stragglers > 0  # decoding weights, which may be in the hundreds, magnify what is lost

    def check(self, settings: ServerSettings) -> None:
        if self.redundancy > 1 or self.stragglers:
            needs_mean(settings)
        if self.stragglers and settings.script:
            why = "a script pushes one batch's gradient, and not a code's combination of several"
            raise UsageError(f"--mode {settings.mode}: not with --script: {why}; use sync:backup")
        needed = self.backup + parse_aggregation(settings.aggregation).fewest
        needs_workers(settings, max(needed, self.stragglers + 1))
