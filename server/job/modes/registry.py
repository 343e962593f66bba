"""The modes by name, such as `--mode stale:bound=4`, and the class that runs a job in each.

The options of each mode have a file of their own. Two classes run all modes but `coded`: `Rounds` and
`Arrivals`. Importing this file loads neither torch nor grpc, so `gc-server --help` answers at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ....common.configuration import options_of, parse_named
from .asynchronous import AsyncOptions
from .coded.options import CodedOptions
from .local import LocalOptions
from .options import ModeOptions
from .stale import StaleOptions
from .sync import SyncOptions

if TYPE_CHECKING:
    from ..state import JobState
    from .mode import Mode

MODES: Mapping[str, type[ModeOptions]] = {
    "sync": SyncOptions,
    "stale": StaleOptions,
    "async": AsyncOptions,
    "local": LocalOptions,
    "coded": CodedOptions,
}


def parse(text: str) -> ModeOptions:
    """Parse the text of `--mode` into the options of the mode that it names.

    Raises:
        SpecError: the mode is unknown (the message lists those that exist), or an option is out of range.
    """
    return parse_named("mode", text, MODES)


def create(options: ModeOptions, state: JobState) -> Mode:
    """Create the mode that runs a new job.

    Args:
        options: options of the mode.
        state: state of the job, which the mode reads and changes.
    """
    from .arrivals import Arrivals  # imported here, because reading options, as for --help, needs no job
    from .coded.exchanges import Coded
    from .rounds import Rounds

    match options:
        case SyncOptions():
            return Rounds(state, options)
        case LocalOptions():
            return Rounds(state, SyncOptions(), options)
        case AsyncOptions():  # or StaleOptions, which has a bound
            inverse, compensated = options.rate == "inverse", options.compensation > 0
            bound = options.staleness_bound
            return Arrivals(state, bound=bound, inverse=inverse, compensated=compensated)
        case CodedOptions():
            return Coded(state, redundancy=options.copies, by_speed=options.blocks == "speed")
        case _:
            raise TypeError(f"{type(options).__name__}: no class runs a job with these options")


def describe() -> str:
    """Return a text that lists every mode with its options and their defaults, for --help."""
    lines = ["", "modes and their options:"]
    for name, mode in MODES.items():
        keys = [f"{key}={each.default_text}" for key, each in options_of(mode).items()]
        lines.append("  " + ":".join(filter(None, [name, ",".join(keys)])))
    return "\n".join(lines)
