"""The names under which classes are stored in files, so that a class may be moved and renamed.

Checkpoints, the journal and workers' own states (`storage.values`) hold instances of dataclasses, NamedTuples
and Enums. Each such class is registered here under a short name that never changes. Reading looks a name up
in this table and nowhere else, so that a file cannot choose which class is instantiated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from enum import Enum
from typing import Any, TypeVar

DERIVED = {"saved": False}  # metadata of a dataclass field that is not written: its owner recomputes it

K = TypeVar("K", bound=type[Any])

_classes: dict[str, type[Any]] = {}
_names: dict[type[Any], str] = {}


def stored(name: str) -> Callable[[K], K]:
    """Return a decorator that registers a dataclass, NamedTuple or Enum under `name`.

    Place it above `@dataclass`. If the class's own room may not import this module, the room that stores the
    class registers it: `stored("name")(Class)`.

    The fields of a registered class are part of the file format. A field that is added, removed or renamed
    makes older files unreadable, so increment `checkpoint.FORMAT` and `journal.MAGIC` with it.

    Raises:
        ValueError: the name belongs to another class, or the class has another name.
        TypeError: the class is not a dataclass, NamedTuple or Enum.
    """

    def register(kind: K) -> K:
        checked: Any = kind
        if not (is_dataclass(checked) or issubclass(checked, Enum) or hasattr(checked, "_fields")):
            raise TypeError(f"{kind.__qualname__}: expected a dataclass, a NamedTuple or an Enum")
        if _classes.setdefault(name, kind) is not kind:
            other = _classes[name].__qualname__
            raise ValueError(f"{kind.__qualname__}: name {name!r} is taken by {other}; choose another")
        if _names.setdefault(kind, name) != name:
            del _classes[name]
            raise ValueError(f"{kind.__qualname__}: already registered as {_names[kind]!r}")
        return kind

    return register


def stored_all(module: Mapping[str, Any], names: Mapping[str, str]) -> None:
    """Register each class that a module defines under its name.

    Args:
        module: the module's globals.
        names: other names for some of the classes.
    """
    for name, kind in module.items():
        if isinstance(kind, type) and kind.__module__ == module["__name__"]:
            stored(names.get(name, name))(kind)


def class_of(name: str) -> type[Any] | None:
    """Return the class registered under `name`; None if there is none."""
    return _classes.get(name)


def name_of(kind: type[Any]) -> str | None:
    """Return the name under which a class is registered; None if it is not registered."""
    return _names.get(kind)
