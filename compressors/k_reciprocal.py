"""`krngc`: divide what may be sent among the layers by what their gradients cost, then keep distinct ones.

Source: the thesis on near-centroid and k-reciprocal gradient compression, chapter 4 (k-RNGC). Two steps:

1.  How many elements each layer keeps. All elements of the model are ranked by omega = |r| / FLOPs_l**kappa,
    FLOPs_l those of the layer's forward pass; the first n / ratio of them are counted per layer. (Erratum:
    equation 4-4 multiplies by the layer's ratio; it has to divide.)
2.  Which ones. In one dimension, the worst rank that element number p of d in ascending order has in
    anybody's list of nearest neighbours is max(p, d - p + 1): nobody has it farther down than the element at
    the far end, who has everything in between before it. So the intersection of all neighbour lists,
    equation 4-8, and the search for a k that makes it large enough, come down to one sort.

    distinct    the elements that are farthest down the lists: the largest worst ranks, half of them from
                either end of the sorted values. The name of the method, "mutually distinct", asks for these;
                the default
    literal     the elements in everybody's list, as printed: the smallest worst ranks, those in the middle.
                They carry the least information, and training with them fails (docs/accuracy.md)

Momentum correction and the delay of the paper are options of every compressor (`wrapping.Wrapping`).
Of equal values at an end, `distinct` takes those with the lower index, unless they are at both ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import torch

from .base import StepContext, TensorSpec
from .indices import Indices
from .kernels import selection
from .kernels.selection import Score, Selection
from .payload import Float32
from .sparse import Sparse, SparseOptions


class Reading(StrEnum):
    """Of equation 4-8; see the head of this file."""

    DISTINCT = "distinct"
    LITERAL = "literal"


@dataclass(frozen=True, kw_only=True, slots=True)
class KReciprocalOptions(SparseOptions):
    """kappa: how much a layer's FLOPs count against it; at 0 magnitude alone decides. reading: see above.

    The warm-up is the paper's.
    """

    warmup: int = 5
    kappa: float = 0.1
    reading: Reading = Reading.DISTINCT

    def __post_init__(self) -> None:
        # Named, because a dataclass with slots is not the class that super() would look for.
        SparseOptions.__post_init__(self)
        if not 0 <= self.kappa <= 10:
            raise ValueError(f"kappa: expected 0 to 10, got {self.kappa:g}")


@dataclass(frozen=True, kw_only=True, slots=True)
class MutualNeighbours:
    """The selector of `krngc`."""

    reading: Reading = Reading.DISTINCT

    def select(self, total: Float32, keep: int, guess: float | None, context: StepContext) -> Selection:
        indices = central(total, keep) if self.reading is Reading.LITERAL else extremes(total, keep)
        return Selection(indices=indices, threshold=0.0)


def extremes(total: Float32, keep: int) -> Indices:
    """The `keep` elements of largest worst rank: half of them from either end of the sorted order.

    Both ends rank alike, so of an odd number the last comes from the end that lies farther from zero: an end
    of zeros, which is what has been sent before, would be chosen again and again.
    """
    lows = (keep + int(keep > 0 and -total.min() > total.max())) // 2
    high = selection.select(total, keep - lows, score=Score.LARGEST).indices
    low = selection.select(total, lows, score=Score.SMALLEST).indices
    both = np.sort(np.concatenate([high, low]))
    if (
        both[1:] == both[:-1]
    ).any():  # Equal values are at both ends, so that both selections took the same of them.
        order = np.argsort(total, kind="stable")
        both = np.sort(np.concatenate([order[:lows], order[total.size - (keep - lows) :]]))
    return both.astype(np.uint32)


def central(total: Float32, keep: int) -> Indices:
    """The `keep` elements of smallest worst rank: the middle of the sorted order."""
    order, start = np.argsort(total, kind="stable"), (total.size - keep) // 2
    return np.sort(order[start : start + keep]).astype(np.uint32)


@dataclass(frozen=True, kw_only=True, slots=True)
class KReciprocal(Sparse):
    """A sparsifier whose ratio holds for the model as a whole."""

    options: KReciprocalOptions = field(default_factory=KReciprocalOptions)

    def plan(
        self, totals: Sequence[torch.Tensor], specs: Sequence[TensorSpec], context: StepContext
    ) -> list[int]:
        keep = self.options.keep(sum(total.numel() for total in totals), context.epoch)
        # A layer that nobody has measured counts as a linear one; one without elements has nothing to keep.
        flops = [spec.flops or 2.0 * max(1, spec.elements) for spec in specs]
        return allot(totals, flops, self.options.kappa, keep)


def allot(totals: Sequence[torch.Tensor], flops: Sequence[float], kappa: float, keep: int) -> list[int]:
    """How many of the `keep` elements with the largest |r| / FLOPs**kappa each tensor holds.

    Of equal importance, earlier tensors and lower indices come first. flops: positive.
    """
    if keep == 0:
        return [0] * len(totals)
    # Only ratios of FLOPs matter; a factor of at most 1 keeps what is finite finite.
    factors = [(min(flops) / each) ** kappa for each in flops]
    importance = torch.cat([total * factor for total, factor in zip(totals, factors, strict=True)])
    chosen = selection.select(importance.numpy(), keep).indices
    ends = np.cumsum([total.numel() for total in totals])
    counts: list[int] = np.diff(np.searchsorted(chosen, ends), prepend=0).tolist()
    return counts


def k_reciprocal(options: KReciprocalOptions) -> KReciprocal:
    return KReciprocal(
        selector=MutualNeighbours(reading=options.reading), options=options, coder=options.values.coder()
    )
