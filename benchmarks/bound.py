"""How long a step takes at least, if only links and computation count.

The way up, the way down and the computation are each measured alone. The bound puts them together as
`--overlap` allows, part by part in the order of the plan:

    off        the computation, then all of the way up, then all of the way down
    backward   a part goes up once backward has its gradients, and the part before it is up. The way down
               begins when the last part is up
    both       a part goes down once it is up, and the part before it is down

Next to the bytes of a part its messages and what processors do are nothing here, but for what they add to the
ways when those are measured. A part takes as much of a way as it has of the elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from ..compressors import Plan
from .traces import ComputedStep

Overlap = Literal["off", "backward", "both"]
# Of the bytes of a way, the first and the last few are not timed: between them are acknowledgements of the
# other way, heartbeats, and waiting for the last stream.
EDGE = 0.05


def produced_by_part(plan: Plan, computed: ComputedStep) -> list[float]:
    """Return for each part the seconds from the start of a step until backward has all gradients of its unit,
    which is compressed at once."""
    found = [0.0] * len(plan.parts)
    for unit in plan.units:
        ready = max(computed.produced[unit.first : unit.last]) - computed.began
        for part in unit.parts:
            found[part] = ready
    return found


def step_bound(
    overlap: Overlap, produced: Sequence[float], shares: Sequence[float], up: float, down: float
) -> float:
    """Return the least seconds of a step.

    Args:
        produced: for each part, seconds from the start of the step until its gradients exist.
        shares: for each part, its fraction of the bytes; 1 in all.
        up, down: seconds of the upload and the download alone.
    """
    is_up = max(produced) if overlap == "off" else 0.0
    arrived: list[float] = []
    for ready, share in zip(produced, shares, strict=True):
        is_up = max(is_up, ready) + share * up
        arrived.append(is_up)
    is_down = 0.0
    for there, share in zip(arrived, shares, strict=True):
        is_down = max(is_down, there if overlap == "both" else is_up) + share * down
    return is_down


def ways(at: Sequence[float], came: Sequence[float], left: Sequence[float]) -> tuple[float, float]:
    """Return the seconds of the upload and of the download of a step in which one follows the other.

    Args:
        at: times of samples, ascending, from before the upload to after the download.
        came, left: bytes that the server had received and sent at these times.
    """
    into, out = (np.asarray(counts, float) - counts[0] for counts in (came, left))
    # When the ways change is where what came before it, and left after it, is most.
    turn = int(np.argmax(into / max(1.0, into[-1]) - out / max(1.0, out[-1])))
    return _seconds(at[: turn + 1], into[: turn + 1]), _seconds(at[turn:], out[turn:])


def _seconds(at: Sequence[float], carried: npt.NDArray[np.float64]) -> float:
    """Return the seconds of all bytes at the rate between the edges."""
    first, last = carried[0], carried[-1]
    if last <= first:
        return 0.0
    edges = first + EDGE * (last - first), last - EDGE * (last - first)
    taken: float = np.diff(np.interp(edges, carried.tolist(), at)).item()
    return taken / (1 - 2 * EDGE)
