"""The names under which classes stand in files, so that a class may move and be renamed.

Checkpoints, the journal and workers' own states (`storage.values`) hold instances of dataclasses,
NamedTuples and Enums. Each such class is registered here under a short name that never changes. Reading looks
a name up in this table and nowhere else, so that no file can choose what is made of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import is_dataclass
from enum import Enum
from typing import Any, TypeVar

DERIVED = {"saved": False}  # metadata of a dataclass field that is not written: its owner computes it again

K = TypeVar("K", bound=type[Any])

_classes: dict[str, type[Any]] = {}
_names: dict[type[Any], str] = {}


def stored(name: str) -> Callable[[K], K]:
    """Return a decorator that registers a dataclass, NamedTuple or Enum under `name`; it goes above
    `@dataclass`. A class whose owner may not import this is registered by whoever stores it:
    `stored("name")(Class)`.

    The fields of a registered class are a part of the format: one that is added, removed or renamed makes
    older files unreadable, so count up `checkpoint.FORMAT` and `journal.MAGIC` with it.

    Raises:
        ValueError: the name is another class's, or the class has another name.
        TypeError: it is no such class.
    """

    def register(kind: K) -> K:
        checked: Any = kind
        if not (is_dataclass(checked) or issubclass(checked, Enum) or hasattr(checked, "_fields")):
            raise TypeError(f"{kind.__qualname__}: expected a dataclass, a NamedTuple or an Enum")
        if _classes.setdefault(name, kind) is not kind:
            other = _classes[name].__qualname__
            raise ValueError(f"{kind.__qualname__}: the name {name!r} is taken, by {other}; choose another")
        if _names.setdefault(kind, name) != name:
            del _classes[name]
            raise ValueError(f"{kind.__qualname__}: is registered as {_names[kind]!r} already")
        return kind

    return register


def class_of(name: str) -> type[Any] | None:
    """Return the class that is registered under a name; None if there is none."""
    return _classes.get(name)


def name_of(kind: type[Any]) -> str | None:
    """Return the name under which a class is registered; None if it is not."""
    return _names.get(kind)
