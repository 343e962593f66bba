"""The square norms of the mean gradient of each tensor, by which SEAMGS decides (formulas 21 and 22).

They are measured at the versions that `planning/norms` names, and averaged over the last `NORM_VERSIONS` of
them. The estimate depends on how the pushes of a version hold a tensor:

    | pushes hold                          | square norm of the tensor                                      |
    |--------------------------------------|----------------------------------------------------------------|
    | the same k of d elements, drawn from | d / k · ‖mean of the drawn elements‖²: unbiased, because each  |
    | one seed (`randk`)                   | element is drawn with probability k / d, and because workers   |
    |                                      | send these gradients without residual                          |
    | the whole tensor, dense              | ‖mean‖², exact but for the residuals of a lossy compressor     |
    | anything else                        | ‖mean of the sent elements‖², residuals included: an estimate  |
    |                                      | with an unknown bias (see `server/plans/planner`)              |

For `draw=stratified` the probability is k / d exactly where k divides d, and otherwise within one element of
a stratum. Several tensors from which one draw was made, in a merged unit, share its d and k; a tensor that is
cut into parts has those of its parts together. With momentum correction the gradient is the velocity,
because the sparsifier chooses among its elements. A tensor that one worker sends whole, for a spike or
because it leaves, counts as sent whole.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ...compressors import SparsePayload
from .mean import Payloads, segments
from .missing import absent

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]


class SquareNorms:
    """The square norms of one version, summed piece by piece while the version is made."""

    def __init__(self, starts: Sequence[int]) -> None:
        """
        Args:
            starts: first element of each tensor in flat order, and the number of all elements."""
        self._starts = starts
        tensors = len(starts) - 1
        self._squares = [0.0] * tensors
        # By tensor: its elements that have a gradient, and how many of these a draw sends on average.
        self._elements = [0.0] * tensors
        self._sent = [0.0] * tensors

    def add(
        self, start: int, gradient: Float32, pushes: Sequence[Payloads], places: Int64 | None = None
    ) -> None:
        """Add a range of the mean gradient.

        Args:
            start: first element of the range, in flat order.
            gradient: values of the range, or those at `places`; all other values are 0.
            pushes: payloads of the range from each push, end to end, or an absent payload.
            places: positions of the values in the range, ascending; None if all values are given.
        """
        begin = 0  # of the segment; like `end`, `first` and `after` it counts from the range's first element
        for end, group in segments([each for each in pushes if not absent(each)]):
            share = _drawn_share(group)
            tensor = bisect_right(self._starts, start + begin) - 1  # the tensor in which the segment begins
            while tensor < len(self._squares) and self._starts[tensor] < start + end:
                # The elements from `first` up to `after` are those of this tensor in the segment.
                first = max(begin, self._starts[tensor] - start)
                after = min(end, self._starts[tensor + 1] - start)
                here = slice(*(first, after) if places is None else np.searchsorted(places, (first, after)))
                self._squares[tensor] += float(np.dot(gradient[here], gradient[here]))
                self._elements[tensor] += after - first
                self._sent[tensor] += share * (after - first)
                tensor += 1
            begin = end

    def totals(self) -> tuple[float, ...]:
        """Return the square norm of each tensor; 0 where nothing was sent."""
        of_tensors = zip(self._squares, self._elements, self._sent, strict=True)
        return tuple(squares * of / sent if sent else 0.0 for squares, of, sent in of_tensors)


def _drawn_share(group: Sequence[Payloads]) -> float:
    """Return the fraction of a segment's elements that the pushes hold, if all hold the elements of one draw;
    otherwise 1.

    group: payloads of the segment from each push."""
    drawn = {
        (each.seed, each.count, each.elements)
        if isinstance(each, SparsePayload) and each.seed and len(payloads) == 1
        else None
        for payloads in group
        for each in payloads
    }
    first = drawn.pop() if len(drawn) == 1 else None
    return 1.0 if first is None else first[1] / first[2]
