"""The least duration of a step, if only links and computation take time.

The upload, the download and the computation are each measured alone. The bound combines them as `--overlap`
allows, part by part in the order of the plan:

    off        the computation, then the whole upload, then the whole download
    backward   a part is uploaded once backward has its gradients, and the previous part is uploaded. The
               download begins when the last part is uploaded
    both       a part is downloaded once it is uploaded, and the previous part is downloaded

The bound neglects messages and processors, except for their effect on the measured upload and download. A
part takes a fraction of each direction's time that equals its fraction of the elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from ..common.parts import Plan
from .traces import ComputedStep

Overlap = Literal["off", "backward", "both"]
# Fraction of a direction's bytes at each end that is not timed: acknowledgements of the other direction,
# heartbeats and waiting for the last stream would be timed with them.
EDGE = 0.05


def produced_by_part(plan: Plan, computed: ComputedStep) -> list[float]:
    """Return for each part the seconds from the start of a step until it can be compressed, in plan order.

    A part is compressed together with its whole unit, once backward has all of the unit's gradients.

    Args:
        plan: the parts and units.
        computed: times of one step's computation.
    """
    found = [0.0] * len(plan.parts)
    for unit in plan.units:
        ready = max(computed.produced[unit.first : unit.last]) - computed.began
        for part in unit.parts:
            found[part] = ready
    return found


def step_bound(
    overlap: Overlap, produced: Sequence[float], shares: Sequence[float], up: float, down: float
) -> float:
    """Return the least seconds of a step that links and computation allow.

    Args:
        overlap: value of --overlap.
        produced: for each part, seconds from the start of the step until its gradients exist.
        shares: for each part, its fraction of the bytes; 1 in all.
        up, down: seconds of the upload and the download alone.
    """
    uploaded_at = max(produced) if overlap == "off" else 0.0
    uploads: list[float] = []
    for ready, share in zip(produced, shares, strict=True):
        uploaded_at = max(uploaded_at, ready) + share * up
        uploads.append(uploaded_at)
    downloaded_at = 0.0
    for part_uploaded_at, share in zip(uploads, shares, strict=True):
        begin = part_uploaded_at if overlap == "both" else uploaded_at
        downloaded_at = max(downloaded_at, begin) + share * down
    return downloaded_at


def upload_and_download(
    at: Sequence[float], received: Sequence[float], sent: Sequence[float]
) -> tuple[float, float]:
    """Return the seconds of the upload and of the download of a step in which one follows the other.

    Args:
        at: times of samples, ascending, from before the upload to after the download.
        received, sent: bytes that the server had received and sent at these times.
    """
    into, out = (np.asarray(counts, float) - counts[0] for counts in (received, sent))
    # The directions change at the sample with most bytes received before it and sent after it.
    turn = int(np.argmax(into / max(1.0, into[-1]) - out / max(1.0, out[-1])))
    return _seconds(at[: turn + 1], into[: turn + 1]), _seconds(at[turn:], out[turn:])


def _seconds(at: Sequence[float], carried: npt.NDArray[np.float64]) -> float:
    """Return the seconds that all bytes would take at the rate measured between the edges."""
    first, last = carried[0], carried[-1]
    if last <= first:
        return 0.0
    edges = first + EDGE * (last - first), last - EDGE * (last - first)
    taken: float = np.diff(np.interp(edges, carried.tolist(), at)).item()
    return taken / (1 - 2 * EDGE)
