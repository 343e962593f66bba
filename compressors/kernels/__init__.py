"""The hot loops, chosen in one place: the rest of the room imports them from here.

`reference` says in plain numpy what each kernel computes, `cpu` computes it fast, and tests hold the two
equal bit for bit.
"""

from __future__ import annotations

from .cpu import (
    add_dense,
    add_quantized,
    all_finite,
    decode_dense,
    encode_dense,
    has_forbidden_code,
    magnitudes,
    quantize,
    warm_up,
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
    "magnitudes",
    "quantize",
    "set_threads",
    "warm_up",
]
