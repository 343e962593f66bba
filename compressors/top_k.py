"""Selection by magnitude or at random: `topk`, `l1`, `randk`, `threshold`.

topk:       the k elements of largest magnitude, exactly; of equal ones those with the lower index.
l1:         the same without error feedback. This is our reading of the baseline "L1" of the thesis on
            near-centroid compression, which says only that importance is the L1 norm.
randk:      one element in each of k equal ranges of the tensor, drawn from a seed that all workers share. No
            index travels, and the workers choose the same elements. Values are not scaled up, because
            feedback returns the rest.
            With draw=uniform any k of d elements, each set of k equally likely, as Rand-K of the papers.
            Where the server measures norms (`StepContext.alone`), the values are those of the gradient alone,
            with momentum correction those of the velocity, and the residual keeps everything else.
            With density=norm a tensor's k follows from the norm of its parameters. Source: SEAMGS-SGD,
            section 3.2: densities in [0.001, 0.02] that rise with it. The paper does not say how they rise;
            see `RandKOptions`. Tensors of one dimension are left out: they are sent whole, as with every
            sparsifier here, where the paper has a density for every layer. All workers have to agree on k,
            and one that joins late cannot compute it. The shard therefore takes the norms of the first
            parameters once, and every plan has them
            (`Plan.norms`).
threshold:  every element of magnitude tau or more, sent as +-tau; the excess over tau stays in the residual.
            Source: Strom, "Scalable Distributed DNN Training Using Commodity GPU Cloud Computing"
            (Interspeech 2015). The number of these elements is not known beforehand.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from .base import Neighbours, Stateless, StepContext
from .indices import drawn_indices
from .kernels import devices, selection
from .kernels.block_selection import select_blocks
from .kernels.shared import Selection
from .one_bit import binary_payload
from .payload import Float32, IndexCoding, Int64, QuantizedPayload
from .sparse import Sparse, coder_of
from .sparsifiers import Draw, RandKOptions, SparseOptions, ThresholdOptions


def _largest_each(values: Float32, tensors: Neighbours, keeps: Int64) -> Selection:
    """Choose the elements of largest magnitude from each of several tensors."""
    least = np.full(keeps.size, selection.LEAST, np.float32)
    return select_blocks(values, tensors.sizes, keeps, least, np.zeros_like(least))


def top_k(options: SparseOptions) -> Sparse:
    return Sparse(
        options=options,
        coder=coder_of(options.values),
        select=lambda total, keep, _: devices.select(total, keep),
        add_and_select=devices.add_and_select,
        select_each=_largest_each,
    )


def rand_k(options: RandKOptions) -> Sparse:
    drawn = IndexCoding.UNIFORM if options.draw is Draw.UNIFORM else IndexCoding.SEEDED

    def select(total: torch.Tensor, keep: int, context: StepContext) -> Selection:
        indices = drawn_indices(drawn, context.shared_seed, total.numel(), keep)
        return Selection(indices, total.numpy()[indices])

    return Sparse(options=options, coder=coder_of(options.values), select=select, drawn=drawn)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sign(Stateless):
    """The coder of `threshold`: one bit per value, for -tau and tau. Stateless."""

    options: ThresholdOptions

    def compress(
        self, gradient: torch.Tensor, state: None, context: StepContext
    ) -> tuple[QuantizedPayload, None]:
        level = self.options.level(context)
        return binary_payload(gradient, None, -level, level), None


def threshold(options: ThresholdOptions) -> Sparse:

    def at_least_each(values: Float32, tensors: Neighbours, keeps: Int64) -> Selection:
        return selection.at_least(values, options.level(tensors.context(0)))  # the level is the same for all

    return Sparse(
        options=SparseOptions(ratio=1),
        coder=Sign(options=options),
        select=lambda total, _, context: selection.at_least(total.numpy(), options.level(context)),
        select_each=at_least_each,
    )
