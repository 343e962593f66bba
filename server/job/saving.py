"""State as plain values, and back: dict, list, str, int, float, bool, bytes and None.

What is saved are the fields of dataclasses, by their annotations, except those marked `DERIVED`: they follow
from the others, and their owner makes them anew after `restore`. The plain values hold nothing of
the state itself, so that a copy that is made of them goes its own way.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections import Counter, OrderedDict, deque
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import cache
from typing import Any

Plain = Any

_PLAIN = frozenset({str, int, float, bool, bytes, types.NoneType})
_SEQUENCES: tuple[Any, ...] = (list, tuple, set, frozenset, deque, Sequence)
_MAPPINGS: tuple[Any, ...] = (dict, OrderedDict, Counter, Mapping)


DERIVED = {"saved": False}  # metadata of a field that is not saved


def save(value: Any) -> Plain:
    """`value` as plain values. Its dataclasses have to say what their fields are."""
    if value.__class__ in _PLAIN:  # most are, and the checks below take longer
        return value
    if isinstance(value, Enum):
        return value.value
    items: Any = value  # of which nothing is known but what the checks say
    if dataclasses.is_dataclass(value):
        plain: dict[str, Any] = {name: save(getattr(items, name)) for name in _fields(items.__class__)}
        return {"type": items.__class__.__name__, **plain}
    if isinstance(value, Mapping):
        return [[save(key), save(items[key])] for key in items]
    if isinstance(value, set | frozenset):
        return [save(each) for each in sorted(items)]
    if isinstance(value, list | tuple | deque):
        return [save(each) for each in items]
    assert value is None or isinstance(value, str | int | float | bytes), f"not plain: {value!r}"
    return value


def restore(target: Any, plain: Plain) -> None:
    """Give a dataclass the fields that were saved of one like it."""
    for name, hint in _fields(target.__class__).items():
        setattr(target, name, load(hint, plain[name]))


def load(hint: Any, plain: Plain) -> Any:
    """The value of a type that was saved."""
    if hint in _PLAIN:
        return plain
    origin: Any = typing.get_origin(hint) or hint
    make: Any = origin  # to be called, where a check has said what it is
    arguments = typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _load_one_of(arguments, plain)
    if dataclasses.is_dataclass(origin):
        return _load_dataclass(origin, plain)
    if origin in _MAPPINGS:
        kinds = (*arguments, int)[:2]  # a Counter counts
        pairs = {load(kinds[0], key): load(kinds[1], each) for key, each in plain}
        return pairs if origin is Mapping else make(pairs)
    if origin is tuple and not (len(arguments) == 2 and arguments[1] is Ellipsis):
        return tuple(load(kind, each) for kind, each in zip(arguments, plain, strict=True))
    if origin in _SEQUENCES:
        made = [load(arguments[0], each) for each in plain]
        return tuple(made) if origin is Sequence else make(made)
    if isinstance(origin, type) and issubclass(origin, Enum):
        return make(plain)
    if isinstance(origin, type) and issubclass(origin, tuple):  # a NamedTuple
        return make(*plain)
    return plain


def _load_one_of(kinds: Sequence[Any], plain: Plain) -> Any:
    if plain is None:
        return None
    able = [kind for kind in kinds if kind is not type(None)]
    if isinstance(plain, dict) and len(able) > 1:
        able = [kind for kind in able if kind.__name__ == plain["type"]]
    return load(able[0], plain)


def _load_dataclass(kind: Any, plain: Plain) -> Any:
    made = kind.__new__(kind)
    for each in dataclasses.fields(kind):
        if not each.metadata.get("saved", True):
            factory = each.default_factory
            fresh = each.default if factory is dataclasses.MISSING else factory()
            object.__setattr__(made, each.name, fresh)
    for name, hint in _fields(kind).items():
        object.__setattr__(made, name, load(hint, plain[name]))
    return made


@cache
def _fields(kind: Any) -> Mapping[str, Any]:
    """The saved fields of a dataclass, with their types."""
    hints = typing.get_type_hints(kind)
    saved = [each.name for each in dataclasses.fields(kind) if each.metadata.get("saved", True)]
    return {name: hints[name] for name in saved}
