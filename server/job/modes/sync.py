"""Options of the mode `sync`: rounds of one step (`rounds`), divided among members as the options say
(`division`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ....common.configuration import UsageError, option
from ....settings import ServerSettings
from ..aggregation import parse_aggregation
from .options import MAX_UINT32, ModeOptions, needs_mean, needs_workers, steps_by_coordinate

if TYPE_CHECKING:
    from ..state import JobState
    from .mode import Mode


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncOptions(ModeOptions):
    """Rounds: the gradients of all workers at one version make the next."""

    backup: int = option(0, "stragglers that a round may close without", least=0, most=MAX_UINT32)
    redundancy: int = option(
        1,
        "workers that compute the same samples; each pushes another slice of the model",
        least=1,
        most=MAX_UINT32,
    )
    stragglers: int = option(
        0,
        "stragglers that a round may close without, because other workers compute their samples too",
        least=0,
        most=MAX_UINT32,
    )

    def create(self, state: JobState) -> Mode:
        from .division import Sharing
        from .rounds import Rounds

        sharing = Sharing(backup=self.backup, redundancy=self.redundancy, stragglers=self.stragglers)
        return Rounds(state, sharing, self.steps_parts(state.rules))

    @property
    def work(self) -> str:
        return "gradients"

    def __post_init__(self) -> None:
        asked = [f"redundancy={self.redundancy}"] if self.redundancy > 1 else []
        asked += [f"stragglers={self.stragglers}"] if self.stragglers else []
        if len(asked) > 1:
            why = "choose one; the first saves bytes, the second waiting"
            raise ValueError(f"{asked[1]}: not with {asked[0]}; {why}")
        if asked and self.backup:
            why = "rounds would close without slices that no other worker pushes"
            if self.stragglers:
                why = "rounds already close without that number of stragglers, and lose no gradient"
            raise ValueError(f"{asked[0]}: not with backup={self.backup}: {why}")

    def steps_parts(self, settings: ServerSettings) -> bool:
        plain = not self.backup and self.redundancy == 1 and not self.stragglers
        return plain and steps_by_coordinate(settings)

    @property
    def slices(self) -> int:
        return self.redundancy

    @property
    def lossless(self) -> bool:
        return self.stragglers > 0  # decoding weights, which may be in the hundreds, magnify any loss

    @property
    def keeps_bases(self) -> bool:
        return self.redundancy == 1 and not self.stragglers

    def check(self, settings: ServerSettings) -> None:
        if self.redundancy > 1 or self.stragglers:
            needs_mean(settings)
        if self.stragglers and settings.script:
            why = "a script pushes the gradient of one batch, and a straggler code needs several batches"
            raise UsageError(f"--mode {settings.mode}: not with --script: {why}; use sync:backup")
        needed = self.backup + parse_aggregation(settings.aggregation).fewest
        needs_workers(settings, max(needed, self.stragglers + 1))
