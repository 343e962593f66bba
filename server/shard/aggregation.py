"""Robust aggregation: computes the rules that `server/job/aggregation` describes, on decoded payloads.

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

# Coordinates that are sorted at a time: few enough that all workers' values of them stay in the cache.
COLUMNS = 1 << 14


def combine(aggregation: Median | Trimmed, gradients: Sequence[Sequence[Payload]], out: Float32) -> None:
    """Overwrite `out` with the median or the trimmed mean of the workers' gradients of a part, coordinate by
    coordinate. All payloads are decoded at once and take that much memory.

    Args:
        gradients: payloads of the part from each worker, end to end, in rank order.
        out: receives the result: float32, shape (elements of the part,).

    Raises:
        ValueError: there are fewer than `aggregation.fewest` workers.
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
    """Return the mean of the middle rows of `block`, which has a row for each worker and is sorted along the
    first axis."""
    import numpy as np

    workers = len(block)
    if isinstance(aggregation, Trimmed):
        part = block[aggregation.wrong : workers - aggregation.wrong]
    else:
        part = block[(workers - 1) // 2 : workers // 2 + 1]
    mean: Float32 = part.mean(axis=0, dtype=np.float64).astype(np.float32)
    return mean


def least_far(aggregation: Krum, gradients: Sequence[Sequence[Payload]]) -> int:
    """Return the index of the worker whose gradient Krum chooses: the sum of square distances to its nearest
    other gradients is least.

    Args:
        aggregation: the rule, with the number of wrong workers that it tolerates.
        gradients: payloads of the whole model from each worker, end to end, in rank order.

    Raises:
        ValueError: there are fewer than `aggregation.fewest` workers.
    """
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
    """Yield blocks of coordinates, one array for each worker: all workers' values of the same coordinates, at
    most `COLUMNS` at a time."""
    import numpy as np

    left = [np.empty(0, np.float32) for _ in streams]
    while True:
        for index, stream in enumerate(streams):
            while not left[index].size and (following := next(stream, None)) is not None:
                left[index] = following
        size = min(COLUMNS, *(each.size for each in left))
        if not size:
            return
        yield [each[:size] for each in left]
        left = [each[size:] for each in left]
