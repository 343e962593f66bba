"""The text that names a compressor: `name[:key=value,...]`, for example `4bit:levels=groups,feedback=on`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, TypeVar, cast, get_type_hints

OptionsT = TypeVar("OptionsT")

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")
_SWITCH = {"on": True, "off": False}


class CompressorError(ValueError):
    """A compressor that cannot be made as asked for; the message lists what is known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressorSpec:
    """A parsed spec. The values are still text: only the compressor's options know their types."""

    name: str
    options: Mapping[str, str]

    def __str__(self) -> str:
        text = ",".join(f"{key}={value}" for key, value in self.options.items())
        return f"{self.name}:{text}" if text else self.name


def parse_spec(text: str) -> CompressorSpec:
    """Split `name[:key=value,...]`; raise `CompressorError` if the text has another form."""
    name, colon, rest = text.partition(":")
    if not _NAME.fullmatch(name):
        raise CompressorError(f"compressor {text!r}: expected name[:key=value,...], got the name {name!r}")
    options: dict[str, str] = {}
    for item in rest.split(",") if colon else ():
        key, equals, value = item.partition("=")
        if not (_NAME.fullmatch(key) and equals and value):
            raise CompressorError(f"compressor {text!r}: expected key=value after the colon, got {item!r}")
        if key in options:
            raise CompressorError(f"compressor {text!r}: the key {key!r} is given twice")
        options[key] = value
    return CompressorSpec(name=name, options=options)


def known(names: Iterable[str]) -> str:
    """A list of names for the end of an error message."""
    return ", ".join(sorted(names)) or "none"


def parse_switch(text: str) -> bool:
    """`on` or `off`; raise `ValueError` otherwise."""
    if text not in _SWITCH:
        raise ValueError(f"expected on or off, got {text!r}")
    return _SWITCH[text]


def parse_options(
    options_type: type[OptionsT], spec: CompressorSpec, *, universal: Iterable[str] = ()
) -> OptionsT:
    """Make the options dataclass of a compressor; its fields are the keys.

    A field is a bool (`on` or `off`), int, float, str or Enum (by value). `universal` keys are read
    elsewhere and only listed among the known ones.
    Raise `CompressorError` that names the key and lists what would have been accepted.
    """
    types = option_types(options_type)
    values: dict[str, Any] = {}
    for key, text in spec.options.items():
        if key not in types:
            keys = known([*types, *universal])
            raise CompressorError(f"compressor {spec.name!r}: unknown key {key!r}; known keys: {keys}")
        try:
            values[key] = _parse_value(types[key], text)
        except ValueError as error:
            raise CompressorError(f"compressor {spec.name!r}: {key}: {error}") from None
    try:
        return options_type(**values)
    except ValueError as error:
        raise CompressorError(f"compressor {spec.name!r}: {error}") from None


def option_types(options_type: type[Any]) -> dict[str, type]:
    """Key to type, in the order of the fields."""
    hints = get_type_hints(options_type)
    return {field.name: hints[field.name] for field in fields(options_type)}


def _parse_value(value_type: type, text: str) -> Any:
    if issubclass(value_type, Enum):
        accepted = {str(member.value): member for member in value_type}
        if text not in accepted:
            raise ValueError(f"expected one of {known(accepted)}, got {text!r}")
        return accepted[text]
    if value_type is bool:
        return parse_switch(text)
    try:
        return cast(Callable[[str], Any], value_type)(text)
    except ValueError:
        raise ValueError(f"expected {value_type.__name__}, got {text!r}") from None
