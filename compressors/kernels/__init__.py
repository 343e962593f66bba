"""The hot loops, chosen in one place: the rest of the room imports them from here.

`reference` and its like say in plain numpy what each kernel computes, `cpu`, `linear`, `selection` and
`sparse` compute it fast, `cuda` some of it on a GPU, and tests hold them equal bit for bit. `devices` takes
torch tensors and chooses between the two by where they lie.
"""

from __future__ import annotations

from . import cpu, devices, linear, selection, sparse
from .cpu import (
    add_dense,
    add_quantized,
    all_finite,
    decode_dense,
    encode_dense,
    has_forbidden_code,
)
from .reference import FLOAT32_MAX, Magnitudes
from .threads import set_threads

__all__ = [
    "FLOAT32_MAX",
    "WARM_UPS",
    "Magnitudes",
    "add_dense",
    "add_quantized",
    "all_finite",
    "cpu",
    "decode_dense",
    "devices",
    "encode_dense",
    "has_forbidden_code",
    "linear",
    "selection",
    "set_threads",
    "sparse",
    "warm_up",
]


# Each compiles a part of the kernels, or loads it from the cache.
WARM_UPS = (cpu.warm_up, linear.warm_up, selection.warm_up, sparse.warm_up)


def warm_up() -> None:
    """Compile every kernel, or load it from the cache, so that no later call has to wait for it.

    The first time takes a while. Call it before starting several processes: they would all compile.
    """
    for part in WARM_UPS:
        part()
