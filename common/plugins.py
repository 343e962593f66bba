"""Things that other distributions bring, such as compressors and tasks, by the entry points they declare, and
functions of the user's own modules.

The group of `kind` is `gradwire.{kind}s`. A built-in name always means the built-in thing. Names are listed
from the metadata of installed distributions; code is loaded only for a name that a user has given.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Collection
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

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


def imported(module: str, name: str) -> object:
    """Import a module, for which the working directory is searched first, and return its member `name`.

    Raises:
        SpecError: there is no such module, or no such member.
        Exception, SystemExit: the module's code raised it.
    """
    here = str(Path.cwd())
    if here not in sys.path:  # `python -m` adds the working directory, an installed command does not
        sys.path.insert(0, here)
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # a module that this one imports
        raise SpecError(
            f"there is no module {error.name!r} in {here} or among the installed packages; run in the "
            "module's folder, or add that folder to PYTHONPATH"
        ) from None
    member: object = getattr(found, name, None)
    if member is None:
        raise SpecError(f"{getattr(found, '__file__', None) or module} has no {name!r}")
    return member
