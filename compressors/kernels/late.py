"""Modules of compiled kernels, imported at the first use of one: numba takes a fifth of a daemon's start, and
Triton is an extra.

What callers and kernels agree on stands here, so that asking for it imports no numba.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

LANES = 16  # elements of a vector

# Elements that a thread takes at a time: a multiple of every kernel's block, long enough (tens of
# microseconds) that taking costs nothing, short enough that threads end together.
CHUNK = 1 << 18

BINS = 1 << 16  # of the histogram in `selecting`


class Late:
    """A module of this package; its attributes import it."""

    def __init__(self, name: str) -> None:
        self._module = name

    def __getattr__(self, name: str) -> Any:
        value = getattr(import_module(f".{self._module}", __package__), name)
        setattr(self, name, value)
        return value


codes, dense, selecting, sparse_loops = Late("codes"), Late("dense"), Late("selecting"), Late("sparse_loops")
linear_loops, linear_sums, cuda = Late("linear_loops"), Late("linear_sums"), Late("cuda")
choosing = Late("choosing")
