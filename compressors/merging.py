"""Units from which a sparsifier chooses as from one tensor (`Plan.merged`).

All tensors of a unit to which the sparsifier applies count as one tensor, also where other tensors lie
between them. It keeps as many elements as it would keep of the single tensors in total, but may choose them
anywhere. Chosen elements travel by *stretch*, a group of tensors that lie end to end. A sparsifier whose
receiver draws the indices chooses from each stretch in proportion to its elements, on average over versions.
Each stretch then has a seed, and no index travels.

This is the only way in which a plan affects the bits. Residuals belong to elements, and merging does not move
them.
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

STEPS = 1 << 16
GOLDEN = 40503  # the golden ratio times STEPS, modulo STEPS


def shares(keep: int, sizes: Sequence[int], version: int) -> list[int]:
    """Divide `keep` elements among stretches in proportion to their sizes; return the number for each
    stretch.

    Rounding differs by version, so that a stretch with less than one element of `keep` has its turn, too. No
    stretch gets more elements than it has.

    Args:
        keep: number of elements in all.
        sizes: number of elements of each stretch.
        version: version of the parameters, from 0.
    """
    total = max(1, sum(sizes))
    # Multiples of the golden ratio modulo 1 are spread evenly from 0 to 1, for any number of versions.
    turn = version * GOLDEN % STEPS * total
    starts = [(keep * before * STEPS + turn) // (total * STEPS) for before in (0, *accumulate(sizes))]
    return [end - start for start, end in pairwise(starts)]


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
    """Compress several stretches of tensors in one call, as one tensor; return each stretch's payloads, and
    the next state.

    Args:
        compressor: compressor, with or without feedback.
        gradient: gradients of the stretches, end to end.
        ledger: ledger whose residual is added, and whose draft receives the new residual.
        ranges: start and end of each stretch, in flat order.
        inner: state of the compressor.
        context: context of the call.
        with_residual: True if the ledger holds a residual, or its draft has to be written.

    Raises:
        FloatingPointError: the compressor found a gradient that is not finite.
    """
    if isinstance(compressor, ErrorFeedback):
        state = ledger.opened(ranges, gradient.device, inner)
        payload, state = compressor.compress(gradient, state, context)
        ledger.take(ranges, state)
        inner = state.inner
    else:
        if with_residual and context.alone:
            for start, end in ranges:
                ledger.draft[start:end].copy_(ledger.residual[start:end])
        elif with_residual:
            gradient = devices.saturate(gradient + gathered(ledger.residual, ranges, gradient.device))
            for start, end in ranges:
                ledger.draft[start:end].zero_()
        payload, inner = compressor.compress(gradient, inner, context)
    borders = [0, *accumulate(end - start for start, end in ranges)]
    return cut_at(payload, borders), inner
