"""Specs: `name[:key=value,...]` names a compressor, task, optimizer, mode or schedule on a command line.

The options of a named thing are a frozen dataclass. Its fields are the keys, and all of them have defaults.
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
Converters = Mapping[str, Callable[[str], object]]  # by key; each raises ValueError for text that it rejects

_KEY = re.compile(r"[a-z0-9][a-z0-9_-]*")
_FUNCTION = re.compile(r"[\w.:-]+")
_SWITCH = {"on": True, "off": False}


class SpecError(ValueError):
    """A spec with an unknown name or key, or a value that is not accepted; the message lists the known
    ones.

    Example:
        >>> try:
        ...     gradwire.compressors.create("topk:ration=100")
        ... except gradwire.SpecError as error:
        ...     print(error)
        compressor 'topk': unknown key 'ration' (did you mean 'ratio'?)...
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """A parsed spec. Its values are still text, because only the named thing knows their types. kind: that of
    the named thing, for messages: "compressor", "task", …"""

    kind: str
    name: str
    options: Mapping[str, str]

    def __str__(self) -> str:
        """Return the spec as it is typed: `name[:key=value,...]`."""
        text = ",".join(f"{key}={value}" for key, value in self.options.items())
        return f"{self.name}:{text}" if text else self.name


def parse_spec(kind: str, text: str, *, functions: bool = False) -> Spec:
    """Split `name[:key=value,...]` into a `Spec`.

    Raises SpecError for another form, or a key twice. functions: True if the name may also be
    `module:function`; it then ends at the last colon before the first `key=`.
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
            raise SpecError(f"{kind} {text!r}: key {key!r} is given twice")
        options[key] = value
    return Spec(kind=kind, name=name, options=options)


def known(names: Iterable[str]) -> str:
    """Return the names, sorted and joined by commas, for an error message; "none" if there are none."""
    return ", ".join(sorted(names)) or "none"


def unknown(kind: str, name: str, names: Iterable[str]) -> str:
    """Return the message that `name` is not among the known `names`, with the nearest and all of them."""
    names = list(names)
    return f"unknown {kind} {name!r}{did_you_mean(name, names)}; known {kind}s: {known(names)}"


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return a hint such as ` (did you mean 'epochs'?)`; empty if none of `names` is close."""
    nearest = difflib.get_close_matches(name, list(names), 1)
    return f" (did you mean {nearest[0]!r}?)" if nearest else ""


@dataclass(frozen=True, slots=True)
class Length:
    """A length of training: epochs, steps, seconds, or percent of the whole training."""

    number: float
    unit: str


_LENGTH = re.compile(r"(\d+(?:\.\d+)?)(epochs?|steps?|s|seconds|min|h|%)?")
_UNITS = {
    "epoch": ("epochs", 1.0),
    "epochs": ("epochs", 1.0),
    "step": ("steps", 1.0),
    "steps": ("steps", 1.0),
    "s": ("seconds", 1.0),
    "seconds": ("seconds", 1.0),
    "min": ("seconds", 60.0),
    "h": ("seconds", 3600.0),
    "%": ("percent", 1.0),
}


def parse_length(text: str, units: Sequence[str] = ("epochs", "steps", "seconds")) -> Length:
    """Return the length that a text such as 200steps, 1.5epochs, 30s, 5min or 2h means; a bare number is
    epochs. Raises ValueError for other texts, and for other than the accepted units."""
    match = _LENGTH.fullmatch(text)
    if match is not None:
        unit, times = _UNITS[match[2] or "epochs"]
        number = float(match[1]) * times
        if unit in units and (unit != "steps" or number.is_integer()):
            return Length(number, unit)
    shown = {"epochs": "2epochs", "steps": "200steps", "seconds": "30s, 5min or 1h", "percent": "10%"}
    raise ValueError(f"expected a length such as {', '.join(shown[unit] for unit in units)}, got {text!r}")


def parse_switch(text: str) -> bool:
    """Return True for `on` and False for `off`; raise ValueError for other text."""
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
    """Return the options dataclass with the values of a spec. A field is a bool (`on` or `off`), int, float,
    str, Enum or `Length`.

    Args:
        converters: function that reads the text of each key; None to read it by the field's type.
        defaults: instance that supplies the values of keys that `spec` leaves out; None for the class's
            defaults.
        universal: keys that the caller reads itself; they only appear in the list of known keys of a message.

    Raises:
        SpecError: unknown key or a value that is not accepted; names the key and says what is.
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
    """Parse `name[:key=value,...]` and return the options dataclass of that name.

    Raises SpecError, which lists the known ones, for an unknown name or key, or a value that is not accepted.
    converters: function from a dataclass to those of `parse_options`.
    """
    spec = parse_spec(kind, text)
    if spec.name not in types:
        raise SpecError(unknown(kind, spec.name, types))
    return parse_options(types[spec.name], spec, converters=converters(types[spec.name]))


@cache  # called once per tensor, and evaluating annotations is slow
def option_types(options_type: type[Any]) -> Mapping[str, type[Any]]:
    """Return the type of each field of an options dataclass by name, in order."""
    hints = get_type_hints(options_type)
    return {field.name: hints[field.name] for field in fields(options_type)}


def _parse_value(value_type: type[Any], text: str) -> Any:
    """Return the value of `value_type` that `text` means; raise ValueError if there is none."""
    if issubclass(value_type, Enum):
        accepted = {str(member.value): member for member in value_type}
        if text not in accepted:
            raise ValueError(f"expected one of {known(accepted)}, got {text!r}{did_you_mean(text, accepted)}")
        return accepted[text]
    if value_type is bool:
        return parse_switch(text)
    if value_type is Length:
        return parse_length(text, ("epochs", "steps", "percent"))
    try:
        return value_type(text)
    except ValueError:
        raise ValueError(f"expected {value_type.__name__}, got {text!r}") from None
