"""Where each block's elements and codes lie, if several tensors are gone through in one call.

Blocks are divided into pieces of `SUM_BLOCK` elements, the last of each perhaps shorter; threads take runs of
pieces, so that many small blocks are shared out as one large one is.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from ..payload import Int64, code_words
from .lazy import CHUNK
from .reference import SUM_BLOCK

# Rows of a layout.
ELEMENTS, WORDS, PIECES = range(3)

CHUNK_PIECES = CHUNK // SUM_BLOCK


def layout_of(bits: int, sizes: Int64) -> Int64:
    """How many elements, 32-bit words of codes, and pieces there are before each block, and in all.

    sizes: int64, shape (blocks,), elements of each. Returns int64, shape (3, blocks + 1), which nobody may
    write to: the next call may return it again.
    """
    if sizes.dtype != np.int64 or sizes.ndim != 1:
        raise ValueError(f"sizes: expected int64 of one dimension, got {sizes.dtype} of shape {sizes.shape}")
    return _layout_of(bits, sizes.tobytes())


# A step asks for the same ones again and again, and this takes longer than a small tensor's kernel.
@lru_cache(64)
def _layout_of(bits: int, encoded: bytes) -> Int64:
    sizes = np.frombuffer(encoded, np.int64)
    # So that their sum is a number that machine code can count to.
    if sizes.size and not 0 <= sizes.min() <= sizes.max() <= 2**62 // sizes.size:
        raise ValueError("sizes: expected numbers that are not negative and not too many")
    layout = np.zeros((3, sizes.size + 1), np.int64)
    counts = sizes, code_words(bits, sizes), -(-sizes // SUM_BLOCK)
    for row, count in zip(layout, counts, strict=True):
        np.cumsum(count, out=row[1:])
    return layout
