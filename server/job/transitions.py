"""State transitions. A file that implements states opens with them as a table; its enum names them, and a
mapping lists the states that may follow each one.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar

S = TypeVar("S", bound=Enum)


def move(current: S, following: S, table: Mapping[S, frozenset[S]]) -> S:
    """Return the following state, which must be one that the table allows."""
    assert following in table[current], f"{current.name} is never followed by {following.name}"
    return following
