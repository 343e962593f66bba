# mypy: ignore-errors
# pyright: basic, reportCallIssue=false, reportAttributeAccessIssue=false
"""Compilation of kernels, and the helpers by which the threads that run one share its work."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import numba
from numba import types
from numba.extending import intrinsic

from . import notices
from .blocks import ELEMENTS, PIECES
from .compile_lock import LockedCache
from .shared import SUM_BLOCK

_SOURCES = sorted(Path(__file__).parent.glob("*.py"))
_FINGERPRINT = hashlib.sha256(b"".join(source.read_bytes() for source in _SOURCES)).hexdigest()[:12]


def kernel(function: Callable[..., None]) -> Callable[..., None]:
    """Compile a function on its first call, to run without the interpreter lock; cache the machine code on
    disk.

    The first argument of a kernel that several threads run is `cursor`, a position that they share; each
    claims its next range of the work there with `fetch_add`.

    Numba keeps the cache beside the source, or in the user's cache folder if the source's is read-only, one
    for each processor name. If neither is writeable, as in a locked-down container, each process compiles for
    itself.
    """
    # Numba names the cache file after the function and notices changes only in the file that defines it. With
    # a hash of all sources in the name, a kernel compiled from older sources is never loaded.
    function.__qualname__ += "_" + _FINGERPRINT
    try:
        compiled = numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:  # "no locator available": numba found no writeable folder
        notices.uncached()
        return numba.njit(nogil=True)(function)
    cache = LockedCache(compiled._cache, f"{function.__module__}.{function.__qualname__}")
    cache.unlock_on_failure(compiled._compiler)
    compiled._cache = cache
    return compiled


@intrinsic
def fetch_add(typingctx, cursor, amount):
    """Add `amount` to cursor[0] (int64) atomically, and return its value before.

    A thread claims ranges of the elements with it, in a loop that each kernel writes out:

        start = fetch_add(cursor, CHUNK)
        while start < size:
            ...
            start = fetch_add(cursor, CHUNK)

    Threads that start late, or run on a busy core, thereby do less, and no other thread waits for them. The
    loop is no shared generator, because numba never releases an array passed to one (`@njit` with `yield`):
    every call would leak its cursor.
    """

    def codegen(context, builder, signature, args):
        pointer = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.atomic_rmw("add", pointer, args[1], "monotonic")

    return types.int64(cursor, types.int64), codegen


@numba.njit
def copy(source, start, stop, target, at=0):
    """Copy source[start:stop] to `target` from index `at` on; the target must be long enough.

    It is a loop, because assigning one slice to another compares their shapes, and numba takes seconds to
    compile the message of that error.
    """
    given, out = source[start:stop], target[at : at + stop - start]
    for k in range(given.size):
        out[k] = given[k]


@numba.njit
def block_of(layout, piece):
    """Return the number of the block that contains a piece; the last block for a piece beyond the end.

    Args:
        piece: number of the piece, counted over all blocks.
    """
    low, high = 0, layout.shape[1] - 2
    while low < high:
        middle = (low + high) // 2
        if layout[PIECES, middle + 1] > piece:
            high = middle
        else:
            low = middle + 1
    return low


@numba.njit
def elements_of(layout, block, first, pieces_end):
    """Return the range of a block's elements that lie in the pieces from `first` to `pieces_end`.

    Args:
        first, pieces_end: numbers of the first piece and of the piece after the last.

    Returns:
        Start and end, counted from the block's first element; equal if the block has no element there.
    """
    before, size = layout[PIECES, block], layout[ELEMENTS, block + 1] - layout[ELEMENTS, block]
    start = (max(first, before) - before) * SUM_BLOCK
    stop = (min(pieces_end, layout[PIECES, block + 1]) - before) * SUM_BLOCK
    return start, max(start, min(stop, size))
