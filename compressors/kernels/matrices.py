"""Positions of each matrix's numbers when one call covers several matrices of one rank.

A matrix of rank r has *numbers*: r vectors over its rows and then r vectors over its columns, each end to
end. They are its bases, or its coordinates in them. Kernels take a `layout`, from `layout_of`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from ..payload import Int64
from .shared import LANES

PANEL = 4  # basis vectors of a pass over two rows
# Each chunk of rows has sums over rows of its own, which take memory and time: few chunks, none too short.
MOST_CHUNKS, LEAST_ROWS = 16, 64

# Rows of a layout: rows of each matrix; numbers and chunks before it; its columns, also padded to whole
# vectors; rows of a chunk; sums over rows before it. CHUNKS is in the place of `blocks.PIECES`, for
# `compiling.block_of`.
ROWS, NUMBERS, CHUNKS, COLUMNS, WIDE, TALL, SUMS = range(7)


@lru_cache(256)  # each step asks for the same layouts
def layout_of(rank: int, shapes: Sequence[tuple[int, int]]) -> Int64:
    """Return the layout of matrices of these shapes (rows, columns), each at least 1: int64 of shape (7,
    matrices + 1), read-only.

    rank: number of basis vectors over rows, and over columns.
    """
    if rank < 1 or not all(1 <= side < 1 << 40 for shape in shapes for side in shape):
        raise ValueError(f"matrices: expected a rank and sides from 1 up, got {rank} and {shapes}")
    layout = np.zeros((7, len(shapes) + 1), np.int64)
    rows, columns = np.array(shapes, np.int64).reshape(-1, 2).T
    wide, tall = -(-columns // LANES) * LANES, 2 * np.maximum(LEAST_ROWS // 2, -(-rows // (2 * MOST_CHUNKS)))
    chunks, vectors = -(-rows // tall), -(-rank // PANEL) * PANEL
    for kind, values in ((ROWS, rows), (COLUMNS, columns), (WIDE, wide), (TALL, tall)):
        layout[kind, :-1] = values
    for kind, counts in (
        (NUMBERS, rank * (rows + columns)),
        (CHUNKS, chunks),
        (SUMS, chunks * vectors * wide),
    ):
        np.cumsum(counts, out=layout[kind, 1:])
    layout.flags.writeable = False
    return layout
