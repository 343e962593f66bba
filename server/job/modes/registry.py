"""The modes by name, such as `--mode stale:bound=4`: ours, and those of other distributions.

A mode is a class of options (`options.ModeOptions`), whose method `create` makes the rules of a job
(`mode.Mode`). Another distribution offers one as an entry point of the group `gradwire.modes`: its name is
the mode's, its object the class. Importing this file loads neither torch nor grpc, so `gc-server --help`
answers at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass

from ....coded.options import CodedOptions
from ....common import plugins
from ....common.configuration import options_of, parse_named
from ....common.spec import SpecError, parse_spec, unknown
from .asynchronous import AsyncOptions
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
    """Parse the text of `--mode` into the options of the mode that it names.

    Raises:
        SpecError: the mode is unknown (the message lists those that exist) or cannot be loaded, or an option
            is out of range.
    """
    name = parse_spec("mode", text).name
    return parse_named("mode", text, {name: _find(name)})


def describe() -> str:
    """Return a text that lists every mode with its options and their defaults, for --help."""
    lines = ["", "modes and their options:"]
    for name in [*MODES, *(each for each in plugins.names("mode", MODES) if each not in MODES)]:
        try:
            keys = [f"{key}={each.default_text}" for key, each in options_of(_find(name)).items()]
            lines.append("  " + ":".join(filter(None, [name, ",".join(keys)])))
        except SpecError as error:
            lines.append(f"  {name}, which cannot be used: {error}")
    return "\n".join(lines)


def _find(name: str) -> type[ModeOptions]:
    """Return the options of a mode, loading another distribution's code if necessary. Raises SpecError."""
    if name in MODES:
        return MODES[name]
    point = plugins.find("mode", name)
    if point is None:
        raise SpecError(unknown("mode", name, plugins.names("mode", MODES)))
    try:
        options = point.load()
        if not (isinstance(options, type) and issubclass(options, ModeOptions) and is_dataclass(options)):
            raise TypeError(f"expected a dataclass derived from ModeOptions, got {options!r}")
        if lacking := sorted(options.__abstractmethods__):
            raise TypeError(f"{options.__name__} lacks {', '.join(lacking)}")
        options_of(options)
    except Exception as error:
        raise SpecError(f"mode {name!r} of {plugins.giver(point)} failed to load: {error!r}") from error
    return options
