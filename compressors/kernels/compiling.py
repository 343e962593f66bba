# mypy: ignore-errors
# pyright: basic, reportCallIssue=false, reportAttributeAccessIssue=false
"""How a kernel is compiled, and how the threads that run it share the work."""

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
from .reference import SUM_BLOCK

_SOURCES = sorted(Path(__file__).parent.glob("*.py"))
_FINGERPRINT = hashlib.sha256(b"".join(source.read_bytes() for source in _SOURCES)).hexdigest()[:12]


def kernel(function: Callable[..., None]) -> Callable[..., None]:
    """Compile on first call, without the interpreter lock, and cache the machine code on disk.

    Numba keeps the cache beside the source, or in the user's cache folder where that is read-only, under the
    name of the processor. Where neither can be written, as in a locked-down container, each process compiles
    for itself.
    """
    # Numba names the cache file after the function and notices changes only in the file where it stands. With
    # all sources of this folder in the name, a kernel compiled from older ones is never found.
    function.__qualname__ += "_" + _FINGERPRINT
    try:
        compiled = numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:  # "no locator available": numba found no folder that it may write to
        notices.uncached()
        return numba.njit(nogil=True)(function)
    cache = LockedCache(compiled._cache, f"{function.__module__}.{function.__qualname__}")
    cache.unlock_on_failure(compiled._compiler)
    compiled._cache = cache
    return compiled


@intrinsic
def fetch_add(typingctx, cursor, amount):
    """Add `amount` to cursor[0] (int64) and return its value before: where this thread's own range starts.

    A kernel takes ranges in a loop of its own:

        start = fetch_add(cursor, CHUNK)
        while start < size:
            ...
            start = fetch_add(cursor, CHUNK)

    Threads that the system starts late, or runs on a busy core, thereby do less instead of being waited for.
    The loop is written out in each kernel, because numba never releases an array that was passed to a
    generator (`@njit` with `yield`): every call would leak its cursor.
    """

    def codegen(context, builder, signature, args):
        pointer = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.atomic_rmw("add", pointer, args[1], "monotonic")

    return types.int64(cursor, types.int64), codegen


@numba.njit
def copy(source, start, stop, target, at=0):
    """Source elements from `start` to `stop` go to the target, from `at` on; they must fit.

    A loop, because to assign one slice to another compares their shapes, and numba takes seconds to compile
    the words of that error.
    """
    given, out = source[start:stop], target[at : at + stop - start]
    for k in range(given.size):
        out[k] = given[k]


@numba.njit
def block_of(layout, piece):
    """The block that holds a piece (`blocks`); the last one for any beyond."""
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
    """Return where the elements of `block` in the pieces from `first` to `pieces_end` begin and end, counted
    from the block's first element; the same number twice if there are none."""
    before, size = layout[PIECES, block], layout[ELEMENTS, block + 1] - layout[ELEMENTS, block]
    start = (max(first, before) - before) * SUM_BLOCK
    stop = (min(pieces_end, layout[PIECES, block + 1]) - before) * SUM_BLOCK
    return start, max(start, min(stop, size))
