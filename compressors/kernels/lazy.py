"""Modules of compiled kernels that are imported at the first use of one of their names.

Importing numba takes a fifth of a daemon's start, and Triton is an optional extra.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


class LazyModule:
    """A stand-in for a module of this package, which is imported when an attribute is first read."""

    def __init__(self, name: str) -> None:
        self._module = name

    def __getattr__(self, name: str) -> Any:
        value = getattr(import_module(f".{self._module}", __package__), name)
        setattr(self, name, value)
        return value


codes, dense = LazyModule("codes"), LazyModule("dense")
low_rank_loops = LazyModule("low_rank_loops")
linear_loops, linear_sums = LazyModule("linear_loops"), LazyModule("linear_sums")
selection_loops, block_selection_loops = LazyModule("selection_loops"), LazyModule("block_selection_loops")
sparse_loops, cuda = LazyModule("sparse_loops"), LazyModule("cuda")
