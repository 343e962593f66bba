"""The modes by name: `--mode stale:bound=4`. Each has a file of its own, with its options.

Imports neither torch nor grpc, so that `gc-server --help` answers at once.
"""

from __future__ import annotations

from collections.abc import Mapping

from ....configuration import options_of, parse_named
from .asynchronous import AsyncOptions
from .coded import CodedOptions
from .local import LocalOptions
from .options import ModeOptions
from .stale import StaleOptions
from .sync import SyncOptions

MODES: Mapping[str, type[ModeOptions]] = {
    "sync": SyncOptions,
    "stale": StaleOptions,
    "async": AsyncOptions,
    "local": LocalOptions,
    "coded": CodedOptions,
}


def parse(text: str) -> ModeOptions:
    """The options of the mode that is named. Raises SpecError, which lists what is known."""
    return parse_named("mode", text, MODES)


def describe() -> str:
    """Every mode with its options and their defaults, for --help."""
    lines = ["", "modes and their options:"]
    for name, mode in MODES.items():
        keys = [f"{key}={each.default_text}" for key, each in options_of(mode).items()]
        lines.append("  " + ":".join(filter(None, [name, ",".join(keys)])))
    return "\n".join(lines)
