"""The hot loops, chosen in one place.

`reference` says what each kernel computes; the rest of the room imports from here.
"""

from __future__ import annotations

from .reference import (
    abs_sum,
    add_dense,
    add_quantized,
    all_finite,
    decode_dense,
    encode_dense,
    has_forbidden_code,
    quantize,
)

__all__ = [
    "abs_sum",
    "add_dense",
    "add_quantized",
    "all_finite",
    "decode_dense",
    "encode_dense",
    "has_forbidden_code",
    "quantize",
    "set_threads",
    "warm_up",
]


def set_threads(threads: int) -> None:
    """Use at most this many threads, at least 1, for a large tensor; the default is one per usable core."""


def warm_up() -> None:
    """Compile every kernel once, into the cache that later processes load from."""
