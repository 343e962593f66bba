"""The mode `coded`: workers exchange packets of gradients, and take the step themselves (`exchanges`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ....configuration import UsageError, option
from ....settings import ServerSettings
from .options import MAX_UINT32, ModeOptions, needs_mean

if TYPE_CHECKING:
    from ..state import JobState
    from .exchanges import Coded


def _parse_copies(text: str) -> None:
    if text != "auto" and not (text.isascii() and text.isdigit() and 1 <= int(text) <= MAX_UINT32):
        raise ValueError(f"expected a whole number from 1, or auto, got {text!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class CodedOptions(ModeOptions):
    """Workers exchange coded packets of gradients, and each takes the step itself."""

    redundancy: str = option(
        "1", "workers that compute each block; auto chooses by measured times", parse=_parse_copies
    )

    @property
    def workers_step(self) -> bool:
        return True

    @property
    def work(self) -> str:
        return "exchange"

    @property
    def copies(self) -> int | None:
        """Of each block; None to choose them by measured times."""
        return None if self.redundancy == "auto" else int(self.redundancy)

    def mode(self, state: JobState) -> Coded:
        from .exchanges import Coded  # late: options are read where there is no job, as for --help

        return Coded(state, redundancy=self.copies)

    def check(self, settings: ServerSettings) -> None:
        needs_mean(settings)
        if settings.downlink not in ("auto", "none"):
            raise UsageError(
                f"--downlink {settings.downlink}: --mode {settings.mode} has no updates; use none"
            )

    def check_workers(self, mode: str, workers: int) -> None:
        most = max(1, workers - 1)
        if self.copies is not None and self.copies > most:
            raise UsageError(f"--mode {mode}: --workers {workers} allows up to {most}")
