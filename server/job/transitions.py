"""Lives: what can become of a thing, as an enum and a table at the head of the file that implements it.

A table says for each state which ones may follow. `move` is the only way from one to another.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar

S = TypeVar("S", bound=Enum)


def move(current: S, following: S, table: Mapping[S, frozenset[S]]) -> S:
    """The state that follows."""
    assert following in table[current], f"{current.name} is never followed by {following.name}"
    return following
