"""`name[:key=value,...]`: how a compressor, task, optimizer or schedule is named on a command line.

The options of each are a frozen dataclass whose fields, all with defaults, are the keys.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from functools import cache, partial
from typing import Any, TypeVar, cast, get_type_hints

OptionsT = TypeVar("OptionsT")
Converters = Mapping[str, Callable[[str], object]]  # by key; each raises ValueError for text that is none

_KEY = re.compile(r"[a-z0-9][a-z0-9_-]*")
_FUNCTION = re.compile(r"[\w.:-]+")
_SWITCH = {"on": True, "off": False}


class SpecError(ValueError):
    """A spec that cannot be made as asked for; the message lists what is known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """A parsed spec. The values are still text: only what is named knows their types.

    kind: what is named, for messages: "compressor", "task", …
    """

    kind: str
    name: str
    options: Mapping[str, str]

    def __str__(self) -> str:
        text = ",".join(f"{key}={value}" for key, value in self.options.items())
        return f"{self.name}:{text}" if text else self.name


def parse_spec(kind: str, text: str, *, functions: bool = False) -> Spec:
    """Split `name[:key=value,...]`; raise `SpecError` if the text has another form.

    functions: the name may also be `module:function`, so only a colon before `key=` ends it.
    """
    if functions:
        end = re.search(r":(?=[^:,=]*=)", text)
        name, rest = (text[: end.start()], text[end.end() :]) if end else (text, None)
    else:
        name, colon, after = text.partition(":")
        rest = after if colon else None
    if not (_FUNCTION if functions else _KEY).fullmatch(name):
        raise SpecError(
            f"{kind} {text!r}: expected name[:key=value,...] in lower case, got the name {name!r}"
        )
    options: dict[str, str] = {}
    for item in rest.split(",") if rest is not None else ():
        key, equals, value = item.partition("=")
        if not (_KEY.fullmatch(key) and equals and value):
            raise SpecError(f"{kind} {text!r}: expected key=value after the colon, got {item!r}")
        if key in options:
            raise SpecError(f"{kind} {text!r}: the key {key!r} is given twice")
        options[key] = value
    return Spec(kind=kind, name=name, options=options)


def known(names: Iterable[str]) -> str:
    """A list of names for the end of an error message."""
    return ", ".join(sorted(names)) or "none"


def unknown(kind: str, name: str, names: Iterable[str]) -> str:
    """Return the message for a name that is not among the known ones."""
    names = list(names)
    return f"unknown {kind} {name!r}{did_you_mean(name, names)}; known {kind}s: {known(names)}"


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """` (did you mean 'epochs'?)` for a name that is nearly one of those; empty if it is not."""
    nearest = difflib.get_close_matches(name, list(names), 1)
    return f" (did you mean {nearest[0]!r}?)" if nearest else ""


@dataclass(frozen=True, slots=True)
class Length:
    """A length of training. unit: epochs, steps or seconds."""

    number: float
    unit: str


_LENGTH = re.compile(r"(\d+(?:\.\d+)?)(epochs?|steps?|s|seconds|min|h)?")
_UNITS = {
    "epoch": ("epochs", 1.0),
    "epochs": ("epochs", 1.0),
    "step": ("steps", 1.0),
    "steps": ("steps", 1.0),
    "s": ("seconds", 1.0),
    "seconds": ("seconds", 1.0),
    "min": ("seconds", 60.0),
    "h": ("seconds", 3600.0),
}


def parse_length(text: str, units: Sequence[str] = ("epochs", "steps", "seconds")) -> Length:
    """Parse a length such as 200steps, 1.5epochs, 30s, 5min or 2h; a number alone is in epochs.

    Raises:
        ValueError: says what is accepted.
    """
    match = _LENGTH.fullmatch(text)
    if match is not None:
        unit, times = _UNITS[match[2] or "epochs"]
        number = float(match[1]) * times
        if unit in units and (unit != "steps" or number.is_integer()):
            return Length(number, unit)
    shown = {"epochs": "2epochs", "steps": "200steps", "seconds": "30s, 5min or 1h"}
    raise ValueError(f"expected a length such as {', '.join(shown[unit] for unit in units)}, got {text!r}")


def parse_switch(text: str) -> bool:
    """`on` or `off`; raise `ValueError` otherwise."""
    if text not in _SWITCH:
        raise ValueError(f"expected on or off, got {text!r}")
    return _SWITCH[text]


def parse_options(
    options_type: type[OptionsT],
    spec: Spec,
    *,
    converters: Converters | None = None,
    defaults: OptionsT | None = None,
    universal: Iterable[str] = (),
) -> OptionsT:
    """Make the options dataclass; a field is a bool (`on` or `off`), int, float, str or Enum (by value).

    converters: of the keys, for a class whose fields do not say it.
    defaults: where what is not given comes from, instead of the class.
    universal: keys that are read elsewhere and only listed among the known ones.
    Raise `SpecError` that names the key and says what would have been accepted.
    """
    if converters is None:
        types = option_types(cast(Any, options_type))
        converters = {key: partial(_parse_value, value_type) for key, value_type in types.items()}
    values: dict[str, Any] = {}
    for key, text in spec.options.items():
        if key not in converters:
            keys = [*converters, *universal]
            hint = f"known keys: {known(keys)}" if keys else "it has no keys"
            raise SpecError(
                f"{spec.kind} {spec.name!r}: unknown key {key!r}{did_you_mean(key, keys)}; {hint}"
            )
        try:
            values[key] = converters[key](text)
        except ValueError as error:
            raise SpecError(f"{spec.kind} {spec.name!r}: {key}: {error}") from None
    try:
        if defaults is None:
            return options_type(**values)
        return cast(OptionsT, replace(cast(Any, defaults), **values))
    except ValueError as error:
        raise SpecError(f"{spec.kind} {spec.name!r}: {error}") from None


def parse_one_of(
    kind: str,
    text: str,
    types: Mapping[str, type[OptionsT]],
    converters: Callable[[type[OptionsT]], Converters | None] = lambda _: None,
) -> OptionsT:
    """Make the options of the named type; raise `SpecError`, which lists the known names."""
    spec = parse_spec(kind, text)
    if spec.name not in types:
        raise SpecError(unknown(kind, spec.name, types))
    return parse_options(types[spec.name], spec, converters=converters(types[spec.name]))


@cache  # a model of many tensors has as many compressors, and evaluating annotations takes long
def option_types(options_type: type[Any]) -> Mapping[str, type[Any]]:
    """Key to type, in the order of the fields."""
    hints = get_type_hints(options_type)
    return {field.name: hints[field.name] for field in fields(options_type)}


def _parse_value(value_type: type[Any], text: str) -> Any:
    if issubclass(value_type, Enum):
        accepted = {str(member.value): member for member in value_type}
        if text not in accepted:
            raise ValueError(f"expected one of {known(accepted)}, got {text!r}{did_you_mean(text, accepted)}")
        return accepted[text]
    if value_type is bool:
        return parse_switch(text)
    if value_type is Length:
        return parse_length(text, ("epochs", "steps"))
    try:
        return value_type(text)
    except ValueError:
        raise ValueError(f"expected {value_type.__name__}, got {text!r}") from None
