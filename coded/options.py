"""Options of the mode `coded`: workers exchange packets of gradients and take the steps (`exchanges`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ..common.configuration import UsageError, option
from ..server.job.modes.options import MAX_UINT32, ModeOptions, needs_mean
from ..settings import ServerSettings

if TYPE_CHECKING:
    from ..server.job.modes.mode import Mode
    from ..server.job.state import JobState


def _parse_copies(text: str) -> None:
    if text != "auto" and not (text.isascii() and text.isdigit() and 1 <= int(text) <= MAX_UINT32):
        raise ValueError(f"expected a whole number from 1, or auto, got {text!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class CodedOptions(ModeOptions):
    """Workers exchange coded packets of gradients, and each takes the step itself."""

    redundancy: str = option(
        "1", "workers that compute each block; auto chooses by measured times", parse=_parse_copies
    )
    blocks: Literal["even", "speed"] = option(
        "even", "size of blocks: even, or speed: so that all workers compute for equally long"
    )

    def create(self, state: JobState) -> Mode:
        from .blocks import Blocks
        from .exchanges import Coded

        return Coded(state, Blocks(most=self.copies, by_speed=self.blocks == "speed"))

    @property
    def workers_step(self) -> bool:
        return True

    @property
    def work(self) -> str:
        return "exchange"

    @property
    def pushes_parts(self) -> bool:
        return False

    @property
    def baseline(self) -> str:
        return "sync"  # exchanges compete with the server's sum

    @property
    def copies(self) -> int | None:
        """Number of workers that compute each block; None to choose it by measured times."""
        return None if self.redundancy == "auto" else int(self.redundancy)

    def check(self, settings: ServerSettings) -> None:
        needs_mean(settings)
        if self.blocks == "speed" and self.copies is None:
            why = "its model of a step's time is that of equal blocks; give a number"
            raise UsageError(f"--mode {settings.mode}: redundancy=auto not with blocks=speed: {why}")
        if settings.downlink not in ("auto", "none"):
            raise UsageError(
                f"--downlink {settings.downlink}: --mode {settings.mode} has no updates; use none"
            )
        if settings.state:
            raise UsageError(
                "--state: not with --mode coded: the workers have the parameters, and the server only an "
                "occasional copy, from which it could not resume. Use --output"
            )
        if settings.keep:
            why = "the server does not have the parameters of every version"
            raise UsageError(f"--keep {settings.keep}: not with --mode {settings.mode}: {why}")
        if settings.fusion.partition("=")[0] != "bytes":
            why = "no gradient is pushed"
            raise UsageError(f"--fusion {settings.fusion}: expected bytes with --mode {settings.mode}: {why}")

    def check_workers(self, mode: str, workers: int) -> None:
        most = max(1, workers - 1)
        if self.copies is not None and self.copies > most:
            raise UsageError(f"--mode {mode}: --workers {workers} allows up to {most}")
