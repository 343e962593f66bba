"""Which compressors there are, and how one is made from its spec.

The built-in ones are one literal dict. A third party adds its own in its package's metadata, as an entry
point of the group `gradwire.compressors` whose name is the compressor's and whose object is a
`CompressorEntry`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass
from enum import Enum
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from ..spec import (
    Spec,
    SpecError,
    known,
    option_types,
    parse_options,
    parse_spec,
    parse_switch,
)
from .base import Compressor
from .dense import Dense, DenseOptions
from .feedback import ErrorFeedback
from .four_bit import FourBit, FourBitOptions
from .payload import DenseFormat
from .two_bit import TwoBit, TwoBitOptions

ENTRY_POINT_GROUP = "gradwire.compressors"


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressorEntry:
    """One line of the registry.

    options: a frozen dataclass whose fields, all with defaults, are the keys of the spec.
    build: options to compressor.
    lossy: wrap it in error feedback, unless the spec says `feedback=off`.
    dense: it is cheap and exact enough for small tensors too, so the layer rule sends them the same way.
    """

    options: type[Any]
    build: Callable[[Any], Compressor]
    lossy: bool = True
    dense: bool = False


BUILT_IN: Mapping[str, CompressorEntry] = {
    "none": CompressorEntry(
        options=DenseOptions,
        build=lambda options: Dense(format=DenseFormat.FLOAT32),
        lossy=False,
        dense=True,
    ),
    "bf16": CompressorEntry(
        options=DenseOptions,
        build=lambda options: Dense(format=DenseFormat.BFLOAT16),
        dense=True,
    ),
    "fp16": CompressorEntry(
        options=DenseOptions,
        build=lambda options: Dense(format=DenseFormat.FLOAT16),
        dense=True,
    ),
    "2bit": CompressorEntry(
        options=TwoBitOptions,
        build=lambda options: TwoBit(options=options),
    ),
    "4bit": CompressorEntry(
        options=FourBitOptions,
        build=lambda options: FourBit(options=options),
    ),
}


def create(spec: str) -> Compressor:
    """The compressor that `spec` names, with error feedback unless it is lossless or told not to.

    Raise `SpecError`, which lists what is known, for an unknown name or key or a bad value.
    """
    parsed = parse_spec("compressor", spec)
    entry = find(parsed.name)
    own = dict(parsed.options)
    # A lossless compressor has no feedback to switch, so there the key is left in and found to be unknown.
    feedback = entry.lossy and _feedback(parsed.name, own.pop("feedback", "on"))
    options = parse_options(
        entry.options,
        Spec(kind="compressor", name=parsed.name, options=own),
        universal=("feedback",) if entry.lossy else (),
    )
    compressor = entry.build(options)
    return ErrorFeedback(compressor=compressor) if feedback else compressor


def _feedback(name: str, text: str) -> bool:
    try:
        return parse_switch(text)
    except ValueError as error:
        raise SpecError(f"compressor {name!r}: feedback: {error}") from None


def names() -> list[str]:
    """Every name that `create` accepts, sorted, without loading third-party code."""
    return sorted({*BUILT_IN, *_third_parties()})


def find(name: str) -> CompressorEntry:
    """The entry of a compressor; raise `SpecError` if there is none."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    points = _third_parties().get(name, [])
    if not points:
        raise SpecError(f"unknown compressor {name!r}; known compressors: {known(names())}")
    if len(points) > 1:
        givers = known(_giver(point) for point in points)
        raise SpecError(f"compressor {name!r} is offered by several packages: {givers}")
    return _load(points[0])


def check_entry(name: str, entry: CompressorEntry) -> None:
    """Raise `SpecError` if an entry could not serve. Built-in ones are checked at import."""
    if not is_dataclass(entry.options):
        raise SpecError(f"compressor {name!r}: options must be a dataclass, got {entry.options}")
    for key, value_type in option_types(entry.options).items():
        if key == "feedback":
            raise SpecError(f"compressor {name!r}: the key 'feedback' belongs to every compressor")
        if value_type not in (bool, int, float, str) and not issubclass(value_type, Enum):
            raise SpecError(f"compressor {name!r}: {key}: no way to read a {value_type} from text")
    entry.build(entry.options())


def _third_parties() -> dict[str, list[EntryPoint]]:
    found: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=ENTRY_POINT_GROUP):
        if point.name not in BUILT_IN:  # a built-in name always means the built-in compressor
            found.setdefault(point.name, []).append(point)
    return found


def _load(point: EntryPoint) -> CompressorEntry:
    try:
        entry = point.load()
    except Exception as error:
        where = f"compressor {point.name!r} of {_giver(point)}"
        raise SpecError(f"{where} failed to load: {error!r}") from error
    if not isinstance(entry, CompressorEntry):
        raise SpecError(f"compressor {point.name!r} of {_giver(point)} is not a CompressorEntry")
    check_entry(point.name, entry)
    return entry


def _giver(point: EntryPoint) -> str:
    return point.dist.name if point.dist else point.value


for _name, _entry in BUILT_IN.items():
    check_entry(_name, _entry)
