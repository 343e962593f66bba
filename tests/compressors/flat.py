"""The payloads of a whole step, which lie end to end in flat order."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from gradwire.compressors import Compressed, Payload, TensorSpec, decode


def ranges_of(payloads: Sequence[Payload]) -> list[tuple[int, int]]:
    """Start and end of what each holds."""
    return [*pairwise(accumulate((payload.elements for payload in payloads), initial=0))]


def as_push(payloads: Sequence[Payload]) -> Compressed:
    """Return payloads in the form that the ledger takes."""
    return Compressed(payloads, ranges_of(payloads))


def by_tensor(payloads: Sequence[Payload], specs: Sequence[TensorSpec]) -> list[npt.NDArray[np.float32]]:
    """Return the decoded values of each tensor; nothing at all where nothing was sent."""
    if not payloads:
        return []
    values = np.concatenate([decode(payload) for payload in payloads])
    return np.split(values, [*accumulate(spec.elements for spec in specs)][:-1])
