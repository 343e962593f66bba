"""Memory that a job needs beside its programs: docs/reference/memory.md has the table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..compressors.sizes import CompressionCosts


@dataclass(frozen=True, kw_only=True, slots=True)
class JobMemory:
    """Bytes that a worker and the server need at most in ordinary steps, beside activations and programs."""

    worker_bytes: float
    server_bytes: float


def memory_of(
    shapes: Sequence[Sequence[int]],
    workers: int,
    compressor: CompressionCosts,
    *,
    feedback: bool,
    momentum: bool = False,
    overlap: str = "backward",
    redundancy: int = 1,
    states: int = 0,
    task: bool = False,
) -> JobMemory:
    """Return the memory of a job in mode sync.

    Args:
        shapes: shapes of the model's tensors.
        feedback: True if the compressor has a residual.
        momentum: True if workers accumulate momentum: its present and its next values.
        overlap: value of --overlap; with both, a worker can undo a step and early parts.
        redundancy: number of workers that compute each gradient and push a slice of it, which they can undo.
        states: number of the optimizer's tensors for each parameter, such as 2 for Adam.
        task: True for workers of a task, which free each gradient once it is compressed; a script keeps them.
    """
    model = 4 * sum(map(math.prod, shapes))
    largest = 4 * max(map(math.prod, shapes))
    down = compressor.down(workers)
    push, update = (sum(map(each.sent_bytes, shapes)) for each in (compressor.up, down))
    both = overlap == "both"
    held = 0 if compressor.up.coordinates is None else states  # replicas step these tensors themselves
    gradients = largest if task and overlap != "off" else model
    copies = 1 + both + held * (1 + both) + feedback * (2 + (both or redundancy > 1)) + 2 * momentum
    push /= redundancy
    return JobMemory(
        worker_bytes=copies * model + gradients + push + update,
        server_bytes=(1 + (down.element_bytes < 4) + states) * model + largest + workers * push + update,
    )
