"""State transitions. A file that implements states begins with a table of them; its enum names the states,
and a mapping lists the states that may follow each one."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar

S = TypeVar("S", bound=Enum)


def move(current: S, following: S, table: Mapping[S, frozenset[S]]) -> S:
    """Return `following`, which `table` must list among the states that may follow `current`.

    Raises:
        AssertionError: the table does not allow the transition.
    """
    assert following in table[current], f"{current.name} is never followed by {following.name}"
    return following
