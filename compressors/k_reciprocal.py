"""`krngc`: divide a budget of elements among the layers by the cost of their gradients, then keep distinct
ones.

Source: the thesis on near-centroid and k-reciprocal gradient compression, chapter 4 (k-RNGC). Two steps:

1. The number of elements that each layer keeps. All elements of the model are ranked by omega = |r| /
   FLOPs_l**kappa, with the FLOPs of the layer's forward pass; the first n / ratio of them are counted per
   layer. (Erratum: equation 4-4 multiplies by the layer's ratio; it has to divide.)
2. The elements to keep. The paper ranks elements by their positions in the lists of nearest neighbours of all
   other elements. In one dimension, the worst such rank of element number p of d, in ascending order, is
   max(p, d - p + 1). It is the rank in the list of the element at the far end, from which all elements in
   between are nearer. The intersection of all neighbour lists, equation 4-8, and the search for a k that
   makes it large enough, therefore reduce to one sort.

    distinct:  the elements with the largest worst ranks, half of them from either end of the sorted values.
               The name of the method, "mutually distinct", asks for these. The default.
    literal:   the elements in all lists, as printed: those with the smallest worst ranks, in the middle. They
               carry the least information, and training with them fails (docs/explanation/accuracy.md).

Momentum correction and the delay of the paper are options of every compressor (`wrapping.Wrapping`). Of equal
values at an end, `distinct` takes those with the lower index, unless they are at both ends.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from .base import StepContext, TensorSpec
from .kernels import selection
from .kernels.shared import Score, Selection
from .payload import Float32
from .sparse import Sparse, coder_of
from .sparsifiers import KReciprocalOptions, Reading

# Below this importance, products round too coarsely for a guess of the threshold.
SMALLEST_GUESS = 1e-30


def extremes(total: Float32, keep: int) -> Selection:
    """Return the `keep` elements of largest worst rank: half of them from either end of the sorted values.

    Both ends rank alike. If the number is odd, the last element comes from the end that lies farther from
    zero: an end of zeros, which are elements that were sent before, would otherwise be chosen again and
    again.
    """
    lows = (keep + int(keep > 0 and -total.min() > total.max())) // 2
    high = selection.select(total, keep - lows, score=Score.LARGEST)
    low = selection.select(total, lows, score=Score.SMALLEST)
    if lows and keep > lows and low.values.max() >= high.values.min():
        # Equal values are at both ends, and both selections may have taken the same elements.
        order = np.argsort(total, kind="stable")
        return _at(total, np.concatenate([order[:lows], order[total.size - (keep - lows) :]]))
    indices = np.concatenate([low.indices, high.indices])
    order = np.argsort(indices, kind="stable")  # the stable sort merges the two sorted halves
    return Selection(indices[order], np.concatenate([low.values, high.values])[order])


def central(total: Float32, keep: int) -> Selection:
    """Return the `keep` elements of smallest worst rank: the middle of the sorted values."""
    order, start = np.argsort(total, kind="stable"), (total.size - keep) // 2
    return _at(total, order[start : start + keep])


def _at(total: Float32, places: npt.NDArray[np.intp]) -> Selection:
    indices = np.sort(places).astype(np.uint32)
    return Selection(indices, total[indices])


@dataclass(frozen=True, kw_only=True, slots=True)
class KReciprocal(Sparse):
    """The sparsifier `krngc`, whose ratio holds for the model as a whole, not for each tensor."""

    options: KReciprocalOptions

    def plan(
        self, totals: Sequence[torch.Tensor], specs: Sequence[TensorSpec], context: StepContext
    ) -> list[int]:
        keep = self.options.keep(sum(total.numel() for total in totals), context.epoch)
        # A layer whose FLOPs were not measured counts as a linear one. The `max` avoids 0 for empty layers.
        flops = [spec.flops or 2.0 * max(1, spec.elements) for spec in specs]
        return allot(totals, flops, self.options.kappa, keep)


def allot(totals: Sequence[torch.Tensor], flops: Sequence[float], kappa: float, keep: int) -> list[int]:
    """Return the number of elements of each tensor among the `keep` elements with the largest |r| /
    FLOPs**kappa.

    Of equally important elements, those of earlier tensors and with lower indices come first. flops: those of
    each tensor's layer, positive.
    """
    if keep == 0:
        return [0] * len(totals)
    # Only ratios of FLOPs matter. Factors of at most 1 cannot make a finite importance infinite.
    factors = [np.float32((min(flops) / each) ** kappa) for each in flops]
    values = [total.numpy() for total in totals]
    importance = _importance(values, factors, _guess(values, factors, keep))
    if sum(each.size for each in importance) < keep:
        importance = _importance(values, factors, 0.0)
    chosen = selection.select(np.concatenate(importance), keep).indices
    ends = np.cumsum([each.size for each in importance])
    counts: list[int] = np.diff(np.searchsorted(chosen, ends), prepend=0).tolist()
    return counts


def _importance(values: Sequence[Float32], factors: Sequence[np.float32], lowest: float) -> list[Float32]:
    """Return |r| * factor of each tensor's elements, leaving out those below `lowest`."""
    found: list[Float32] = []
    for each, factor in zip(values, factors, strict=True):
        if lowest > 0:
            # Products round to float32: a value slightly below the quotient may reach `lowest`, too.
            reach = lowest / float(factor) * (1 - 1e-6) if factor > 0 else math.inf
            each = selection.at_least(each, reach).values
        product = np.abs(each) * factor
        found.append(product[product >= lowest])
    return found


def _guess(values: Sequence[Float32], factors: Sequence[np.float32], keep: int) -> float:
    """Return an importance that somewhat more than `keep` elements reach, estimated from samples; 0 if there
    is none."""
    few = [selection.sample(each) for each in values]
    importance: Float32 = np.concatenate(_importance(few, factors, 0.0))
    weights = [all_of.size / max(1, some.size) for all_of, some in zip(values, few, strict=True)]
    order: npt.NDArray[np.intp] = np.argsort(-importance)
    reached: npt.NDArray[np.float64] = np.cumsum(np.repeat(weights, [some.size for some in few])[order])
    # Neighbouring elements are similar, so a sampled stride counts as one observation, as in `selection`.
    position = int(np.searchsorted(reached, keep + 3 * math.sqrt(keep * selection.STRIDE)))
    lowest = importance.item(order.item(position)) if position < importance.size else 0.0
    return lowest if lowest > SMALLEST_GUESS else 0.0


def k_reciprocal(options: KReciprocalOptions) -> KReciprocal:
    chosen = central if options.reading is Reading.LITERAL else extremes
    return KReciprocal(
        options=options,
        coder=coder_of(options.values),
        select=lambda total, keep, _: chosen(total.numpy(), keep),
    )
