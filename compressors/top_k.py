"""Selection by magnitude or by chance: `topk`, `l1`, `randk`, `threshold`.

topk        the k elements of largest magnitude, exactly; of equal ones those with the lower index
l1          the same without error feedback: our reading of the baseline "L1" of the thesis on near-centroid
            compression, which says only that importance is the L1 norm
randk       one element in each of k equal parts of the tensor, drawn from a seed that all workers share,
            so that no index travels and the workers' choices coincide; unscaled, feedback returns the rest.
            Difference: Rand-K of the papers draws k of d elements, each set of k equally likely
threshold   every element of magnitude tau or more, sent as +-tau; what exceeds tau stays in the residual.
            Source: Strom, "Scalable Distributed DNN Training Using Commodity GPU Cloud Computing"
            (Interspeech 2015). How many elements that are is not known beforehand
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch

from .base import Stateless, StepContext
from .indices import Indices, seeded_payload
from .kernels import devices, selection
from .kernels.selection import Selection
from .kernels.sparse import seeded_indices
from .one_bit import binary_payload
from .payload import QuantizedPayload, SparsePayload, ValuePayload
from .sparse import Sparse, SparseOptions
from .thresholds import Scale


@dataclass(frozen=True, kw_only=True, slots=True)
class LargestMagnitude:
    """The selector of `topk`."""

    on_gpu: ClassVar[bool] = True

    def select(self, total: torch.Tensor, keep: int, context: StepContext) -> Selection:
        return devices.select(total, keep)

    def add_and_select(
        self, gradient: torch.Tensor, residual: torch.Tensor, keep: int, context: StepContext
    ) -> Selection:
        return devices.add_and_select(gradient, residual, keep)


def top_k(options: SparseOptions) -> Sparse:
    return Sparse(selector=LargestMagnitude(), options=options, coder=options.values.coder())


@dataclass(frozen=True, kw_only=True, slots=True)
class Seeded:
    """The selector of `randk`."""

    on_gpu: ClassVar[bool] = False

    def select(self, total: torch.Tensor, keep: int, context: StepContext) -> Selection:
        indices = seeded_indices(context.shared_seed, total.numel(), keep)
        return Selection(indices, total.numpy()[indices])


@dataclass(frozen=True, kw_only=True, slots=True)
class RandK(Sparse):
    """A sparsifier whose receiver draws the indices itself."""

    def _join(
        self, elements: int, indices: Indices, values: ValuePayload, context: StepContext
    ) -> SparsePayload:
        return seeded_payload(elements, context.shared_seed, values)


def rand_k(options: SparseOptions) -> RandK:
    return RandK(selector=Seeded(), options=options, coder=options.values.coder())


@dataclass(frozen=True, kw_only=True, slots=True)
class ThresholdOptions:
    """tau: what is compared with, and sent. scale: of which gradient; see `thresholds.Scale`."""

    tau: float = 0.1
    scale: Scale = Scale.SUM

    def __post_init__(self) -> None:
        # Far inside float32, so that it stays positive and finite when it is divided by the samples.
        if not 1e-20 <= self.tau <= 1e20:
            raise ValueError(f"tau: expected a number from 1e-20 to 1e20, got {self.tau}")

    def level(self, context: StepContext) -> float:
        return float(np.float32(self.tau / self.scale.factor(context)))


@dataclass(frozen=True, kw_only=True, slots=True)
class AtLeast:
    """The selector of `threshold`."""

    options: ThresholdOptions = field(default_factory=ThresholdOptions)
    on_gpu: ClassVar[bool] = False

    def select(self, total: torch.Tensor, keep: int, context: StepContext) -> Selection:
        return selection.at_least(total.numpy(), self.options.level(context))


@dataclass(frozen=True, kw_only=True, slots=True)
class Sign(Stateless):
    """The coder of `threshold`: one bit, for -tau and tau. Stateless."""

    options: ThresholdOptions = field(default_factory=ThresholdOptions)

    def compress(
        self, gradient: torch.Tensor, state: None, context: StepContext
    ) -> tuple[QuantizedPayload, None]:
        level = self.options.level(context)
        return binary_payload(gradient, None, -level, level), None


def threshold(options: ThresholdOptions) -> Sparse:
    return Sparse(
        selector=AtLeast(options=options), options=SparseOptions(ratio=1), coder=Sign(options=options)
    )
