"""Units that a sparsifier chooses from as a whole (`Plan.merged`).

All tensors of a unit that the sparsifier is for are one tensor to it, also where others lie between them: it
keeps as many elements as it would of all of them by themselves, whichever they are. What is chosen travels by
*stretch*, tensors that lie end to end. A sparsifier whose receiver draws the indices chooses from each
stretch, in proportion to its elements: so each has a seed, and no index travels.

This is the one way in which a plan affects the bits. Residuals belong to elements, which merging leaves where
they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch

from .base import Compressor, StepContext
from .cutting import cut_at
from .feedback import ErrorFeedback
from .kernels import devices
from .ledger import Ledger, Ranges, gathered
from .payload import Payload


def shares(keep: int, sizes: Sequence[int]) -> list[int]:
    """`keep` elements divided among stretches in proportion to their sizes: no more of any than it has."""
    total = max(1, sum(sizes))
    return [keep * end // total - keep * start // total for start, end in pairwise((0, *accumulate(sizes)))]


def compress_together(
    compressor: Compressor,
    gradient: torch.Tensor,
    ledger: Ledger,
    ranges: Ranges,
    inner: Any,
    context: StepContext,
    *,
    with_residual: bool,
) -> tuple[list[list[Payload]], Any]:
    """One call for stretches, given as ranges in flat order, whose gradients lie end to end in `gradient`.

    inner: the state. with_residual: whether the ledger may hold something, and its draft has to be written.

    Returns payloads by stretch, and the next state. Raises FloatingPointError as the compressor does.
    """
    if isinstance(compressor, ErrorFeedback):
        state = ledger.opened(ranges, gradient.device, inner)
        payload, state = compressor.compress(gradient, state, context)
        ledger.take(ranges, state)
        inner = state.inner
    else:
        if with_residual:
            gradient = devices.saturate(gradient + gathered(ledger.residual, ranges, gradient.device))
            for start, end in ranges:
                ledger.draft[start:end].zero_()
        payload, inner = compressor.compress(gradient, inner, context)
    borders = [0, *accumulate(end - start for start, end in ranges)]
    return cut_at(payload, borders), inner
