"""The hot loops, chosen in one place: the rest of the room imports them from here.

`reference` and its like say in plain numpy what each kernel computes, `cpu`, `linear`, `selection` and
`sparse` compute it fast, and tests hold the two equal bit for bit.
"""

from __future__ import annotations

from . import cpu, linear, selection, sparse
from .cpu import (
    add_dense,
    add_quantized,
    all_finite,
    decode_dense,
    encode_dense,
    has_forbidden_code,
    magnitudes,
    quantize,
)
from .reference import FLOAT32_MAX, Magnitudes
from .threads import set_threads

__all__ = [
    "FLOAT32_MAX",
    "Magnitudes",
    "add_dense",
    "add_quantized",
    "all_finite",
    "decode_dense",
    "encode_dense",
    "has_forbidden_code",
    "linear",
    "magnitudes",
    "quantize",
    "selection",
    "set_threads",
    "sparse",
    "warm_up",
]


def warm_up() -> None:
    """Compile every kernel, or load it from the cache, so that no later call has to wait for it.

    The first time takes a while. Call it before starting several processes: they would all compile.
    """
    for kernels in (cpu, linear, selection, sparse):
        kernels.warm_up()
