"""Positions of each block's elements and codes when one call covers several tensors.

A block is one tensor. Blocks are divided into pieces of `SUM_BLOCK` elements; the last piece of a block may
be shorter. Threads claim runs of pieces, so that many small blocks spread over threads like one large block.
Kernels take a `layout`, from `layout_of`.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from ..payload import Int64, code_words
from .shared import CHUNK, SUM_BLOCK

# Rows of a layout: elements, 32-bit words of codes, and pieces before each block.
ELEMENTS, WORDS, PIECES = range(3)

CHUNK_PIECES = CHUNK // SUM_BLOCK


def layout_of(bits: int, sizes: Int64) -> Int64:
    """Return the number of elements, 32-bit code words and pieces before each block, and in all of them.

    Args:
        sizes: number of elements of each block, int64, shape (blocks,).

    Returns:
        int64 of shape (3, blocks + 1), with the rows ELEMENTS, WORDS and PIECES; read-only, because a later
            call may return the same array.
    """
    if sizes.dtype != np.int64 or sizes.ndim != 1:
        raise ValueError(f"sizes: expected int64 of one dimension, got {sizes.dtype} of shape {sizes.shape}")
    return _layout_of(bits, sizes.tobytes())


# Cached, because each step asks for the same layouts, and computing one takes longer than a small tensor's
# kernel.
@lru_cache(64)
def _layout_of(bits: int, encoded: bytes) -> Int64:
    sizes = np.frombuffer(encoded, np.int64)
    # The bound keeps the total within int64, in which machine code counts.
    if sizes.size and not 0 <= sizes.min() <= sizes.max() <= 2**62 // sizes.size:
        raise ValueError("sizes: expected values from 0 up, whose sum is at most 2**62")
    layout = np.zeros((3, sizes.size + 1), np.int64)
    counts = sizes, code_words(bits, sizes), -(-sizes // SUM_BLOCK)
    for row, count in zip(layout, counts, strict=True):
        np.cumsum(count, out=row[1:])
    return layout
