"""Environment variables that are no options: other programs', links of containers, and misspelt ones."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator, Mapping

# Variables that Kubernetes and Docker set for a service whose name begins with gc-.
_LINK_NAME = re.compile(
    r"_SERVICE_HOST$|_SERVICE_PORT(_\w+)?$|_PORT_\d+_(TCP|UDP|SCTP)(_(PORT|PROTO|ADDR))?$"
)
_LINK_VALUE = re.compile(r"(tcp|udp|sctp)://")


def is_link(name: str, value: str) -> bool:
    """Return True if Kubernetes or Docker set this variable for a service, so that it is not an option."""
    return bool(_LINK_NAME.search(name) or _LINK_VALUE.match(value))


def unknown_variables(environ: Mapping[str, str], known: Collection[str]) -> Iterator[tuple[str, str | None]]:
    """Yield each `GC_` variable that is not `known`, with the variable that it misspells; None if it
    resembles none.

    Other programs have such variables, too: GC_PROJECT_ID, or the GC_INITIAL_HEAP_SIZE of garbage collectors.
    """
    for name, value in sorted(environ.items()):
        if name.startswith("GC_") and name not in known and not is_link(name, value):
            yield name, _misspelt(name, known)


def _misspelt(name: str, known: Collection[str]) -> str | None:
    for each in known:
        if sorted(each.replace("_", "")) == sorted(name.replace("_", "")):
            return each
    # Without the common prefix, which makes any two short names alike.
    nearest = difflib.get_close_matches(name[3:], [each[3:] for each in known], 1, cutoff=0.8)
    return f"GC_{nearest[0]}" if nearest else None
