"""Robust aggregation: computes what `server/job/aggregation` describes, on decoded payloads.

This module imports torch and numpy only when something is aggregated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ..job.aggregation import Krum, Median, Trimmed

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from ...compressors import Payload

    Float32 = npt.NDArray[np.float32]

# Coordinates that are sorted at a time: so many workers' values of them stay in the cache.
COLUMNS = 1 << 14


def combine(aggregation: Median | Trimmed, gradients: Sequence[Sequence[Payload]], out: Float32) -> None:
    """Overwrite `out` with what the workers' gradients come to, of a part of the model.

    gradients: of each worker, in rank order, the payloads of the part, end to end; at least
    `aggregation.fewest` workers. Decodes them all at once, so it takes that much memory.
    """
    import numpy as np

    if len(gradients) < aggregation.fewest:
        raise ValueError(f"gradients: expected at least {aggregation.fewest}, got {len(gradients)}")
    rows = [_decoded(payloads) for payloads in gradients]
    for start in range(0, out.size, COLUMNS):
        block = np.stack([row[start : start + COLUMNS] for row in rows])
        block.sort(axis=0)
        out[start : start + COLUMNS] = _middle(aggregation, block)


def _decoded(payloads: Sequence[Payload]) -> Float32:
    import numpy as np

    from ...compressors import decode

    return np.concatenate([decode(payload) for payload in payloads])


def _middle(aggregation: Median | Trimmed, block: Float32) -> Float32:
    """Return the mean of the middle of `block`, which is sorted along the first axis, a row per worker."""
    import numpy as np

    workers = len(block)
    if isinstance(aggregation, Trimmed):
        part = block[aggregation.wrong : workers - aggregation.wrong]
    else:
        part = block[(workers - 1) // 2 : workers // 2 + 1]
    mean: Float32 = part.mean(axis=0, dtype=np.float64).astype(np.float32)
    return mean


def least_far(aggregation: Krum, gradients: Sequence[Sequence[Payload]]) -> int:
    """Which worker Krum chooses. gradients: as for `combine`, of the whole model."""
    import numpy as np

    from ...compressors import decode

    workers = len(gradients)
    if workers < aggregation.fewest:
        raise ValueError(f"gradients: expected at least {aggregation.fewest}, got {workers}")
    squares = np.zeros((workers, workers))
    for rows in _rows([map(decode, payloads) for payloads in gradients]):
        block = np.stack(rows).astype(np.float64)
        for worker in range(workers - 1):
            apart = block[worker + 1 :] - block[worker]
            squares[worker, worker + 1 :] += np.einsum("ij,ij->i", apart, apart)
    squares += squares.T
    np.fill_diagonal(squares, np.inf)
    nearest = np.sort(squares, axis=1)[:, : workers - aggregation.wrong - 2]
    return int(np.argmin(nearest.sum(axis=1)))


def _rows(streams: Sequence[Iterator[Float32]]) -> Iterator[list[Float32]]:
    """All workers' values of the same coordinates, as many at a time as stay in the cache."""
    import numpy as np

    left = [np.empty(0, np.float32) for _ in streams]
    while True:
        for place, stream in enumerate(streams):
            while not left[place].size and (following := next(stream, None)) is not None:
                left[place] = following
        size = min(COLUMNS, *(each.size for each in left))
        if not size:
            return
        yield [each[:size] for each in left]
        left = [each[size:] for each in left]
