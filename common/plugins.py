"""Things that other distributions bring, such as compressors and tasks, by the entry points they declare.

The group of `kind` is `gradwire.{kind}s`. A built-in name always means the built-in thing. Names are listed
from the metadata of installed distributions; code is loaded only for a name that a user has given.
"""

from __future__ import annotations

from collections.abc import Collection
from importlib.metadata import EntryPoint, entry_points

from .spec import SpecError, known


def names(kind: str, built_in: Collection[str]) -> list[str]:
    """Return all names of this kind, sorted: the built-in ones and those of other distributions."""
    return sorted({*built_in, *(point.name for point in entry_points(group=f"gradwire.{kind}s"))})


def find(kind: str, name: str) -> EntryPoint | None:
    """Return the entry point of a name that is not built in; None if no distribution declares it.

    Raises:
        SpecError: several distributions declare it.
    """
    points = list(entry_points(group=f"gradwire.{kind}s", name=name))
    if len(points) > 1:
        givers = known(map(giver, points))
        raise SpecError(f"{kind} {name!r} is offered by several packages: {givers}; uninstall all but one")
    return points[0] if points else None


def giver(point: EntryPoint) -> str:
    """Return the name of the distribution that declares an entry point."""
    return point.dist.name if point.dist else point.value
