"""The compressors that send some elements: their options and their declarations.

Formulas and sources stand in the file of each compressor, which `build` imports; what they share in `sparse`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np

from ..planning.compression import TensorCoding
from .entry import WITHOUT_FEEDBACK, CompressorEntry, Joined
from .quantizers import MEANT, Scale, always, check_threshold, late, lost
from .wrapping import Wrapping

if TYPE_CHECKING:
    from .base import StepContext

CHOSEN_AGAIN = "what has been sent is 0, and may be what it chooses again"
BY_LAYERS = "densities by norms are for the gradients of workers"
BY_NORMS = "how many elements it sends of a tensor follows from the norm of its parameters"
# Above this a tensor is compressed faster by itself: in one thread a run took 0.8 to 0.9 of the CPU time at
# 48 Ki elements a tensor, 0.9 to 1.2 at 64 Ki, 1.1 to 1.5 at 128 Ki and up to 2.3 at 256 Ki.
ALONE = 3 << 14
BY_TAU = "how many elements reach tau is not known before a step"


class Values(StrEnum):
    """How the values of the chosen elements travel."""

    FLOAT32 = "float32"
    BFLOAT16 = "bf16"
    FLOAT16 = "fp16"
    EIGHT_BIT = "8bit"
    FOUR_BIT = "4bit"
    ONE_BIT = "1bit"

    @property
    def bits(self) -> int:
        return {Values.FLOAT32: 32, Values.EIGHT_BIT: 8, Values.FOUR_BIT: 4, Values.ONE_BIT: 1}.get(self, 16)


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseOptions:
    """ratio: elements per kept element, from 1. warmup: epochs over which the ratio grows to it.
    values: how values travel."""

    ratio: float = 100.0
    warmup: int = 0
    values: Values = Values.BFLOAT16

    def __post_init__(self) -> None:
        if not 1 <= self.ratio <= 1e9:
            raise ValueError(f"ratio: expected a number from 1 to 1e9, got {self.ratio:g}")
        if not 0 <= self.warmup <= 10_000:
            raise ValueError(f"warmup: expected 0 to 10000 epochs, got {self.warmup}")

    def densities(self, norms: Sequence[float]) -> list[float] | None:
        """Return which part of its elements each tensor sends in the end, by the norms of the parameters that
        it is for; None where these do not affect it."""
        return None

    def ratio_at(self, epoch: float, density: float | None = None) -> float:
        """Grows exponentially, in epochs: ratio**((epoch + 1) / (warmup + 1)) up to `ratio`, or 1 / density.

        For ratio 1000 and 4 epochs these are the steps of DGC: 75, 93.75, 98.4, 99.6 and then 99.9 %.
        """
        ratio = self.ratio if density is None else 1 / density
        if epoch >= self.warmup:
            return ratio
        return float(ratio ** ((int(epoch) + 1) / (self.warmup + 1)))

    def keep(self, elements: int, epoch: float, density: float | None = None) -> int:
        """How many of a tensor's elements are sent: elements / ratio, rounded down, at least one of any.

        Source: (3-8) of the thesis on near-centroid compression.
        """
        return min(elements, max(1, int(elements / self.ratio_at(epoch, density))))


@dataclass(frozen=True, kw_only=True, slots=True)
class DgcOptions(SparseOptions):
    """Options of every sparsifier, with the paper's four epochs of warm-up."""

    warmup: int = 4


class Reading(StrEnum):
    """Readings of equation 4-8; see the head of `k_reciprocal`."""

    DISTINCT = "distinct"
    LITERAL = "literal"


@dataclass(frozen=True, kw_only=True, slots=True)
class KReciprocalOptions(SparseOptions):
    """kappa: how much a layer's FLOPs count against it; at 0 magnitude alone decides. reading: of the paper's
    equation.

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


class Draw(StrEnum):
    """Which elements `randk` draws: one in each of k equal parts, or any k of them."""

    STRATIFIED = "stratified"
    UNIFORM = "uniform"


class Density(StrEnum):
    """Which part of a tensor's elements `randk` sends: 1 / ratio, or by the norm of its parameters."""

    RATIO = "ratio"
    NORM = "norm"


# Of the tensor with the least norm, and of the one with the largest. Source: SEAMGS-SGD, section 3.2.
DENSITIES = 0.001, 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class RandKOptions(SparseOptions):
    """draw: which elements. density: how many of each tensor; `ratio` has no say with norms."""

    draw: Draw = Draw.STRATIFIED
    density: Density = Density.RATIO

    def densities(self, norms: Sequence[float]) -> list[float] | None:
        """From the least to the largest, linear in the norm, which is our reading; the middle if all are
        equal."""
        if self.density is Density.RATIO:
            return None
        (least, most), (low, high) = DENSITIES, (min(norms), max(norms))
        places = [(norm - low) / (high - low) if high > low else 0.5 for norm in norms]
        return [least + (most - least) * place for place in places]


@dataclass(frozen=True, kw_only=True, slots=True)
class ThresholdOptions:
    """tau: what is compared with, and sent. scale: of which gradient; see `Scale`."""

    tau: float = 0.1
    scale: Scale = Scale.SUM

    def __post_init__(self) -> None:
        check_threshold("tau", self.tau)

    def level(self, context: StepContext) -> float:
        return float(np.float32(self.tau / self.scale.factor(context.samples)))


def _elements(options: SparseOptions, *, indices: bool = True) -> TensorCoding:
    """Return what a sparsifier sends. indices: whether they travel."""
    return TensorCoding(
        bits=options.values.bits,
        bucket=4096 if options.values is Values.EIGHT_BIT else 0,
        density=1 / options.ratio,
        indices=indices,
    )


def _joins(options: SparseOptions, *, most: int | None = None) -> Joined | None:
    """Return how neighbours share a call, where their values are coded one by one."""
    return Joined(how="neighbours", most=most) if options.values.bits >= 16 else None


def _joins_small(options: SparseOptions) -> Joined | None:
    """Like `_joins`, for a sparsifier with one pass that adds and selects: a large tensor has more of that
    than of sharing a call, in which gradients are copied, added and selected from in passes of their own."""
    return _joins(options, most=ALONE)


def _rand_k_sends(options: RandKOptions) -> TensorCoding | str:
    if options.density is Density.NORM:
        return BY_NORMS
    return _elements(options, indices=False)


def _selecting(nanoseconds: float) -> Callable[[SparseOptions], float]:
    """Measured at 1 % of the elements, plus a nanosecond: four workers that select at the same time on two
    cores take longer."""
    return lambda options: nanoseconds + 0.15 * (100 / options.ratio - 1)


def _sparse_lost(measured: Mapping[tuple[int, int], float]) -> Callable[[SparseOptions], float]:
    """By ratio and epochs of warm-up: with a larger ratio and a shorter warm-up no less is lost."""

    def lost(options: SparseOptions) -> float:
        losses = (
            loss
            for (ratio, warmup), loss in measured.items()
            if options.ratio >= ratio and options.warmup <= warmup
        )
        return max(losses, default=1.0)

    return lost


SPARSIFIERS: Mapping[str, CompressorEntry] = {
    "dgc": CompressorEntry(
        options=DgcOptions,
        build=late("dgc", "dgc"),
        wrapping=Wrapping(momentum=0.9),
        joins=_joins,
        merges=True,
        sends=_elements,
        nanoseconds=_selecting(2.8),
        adam_loss=_sparse_lost({(100, 4): 1.28}),
    ),
    # What has been sent is 0, and may be farthest from the median or at an end.
    "gcac": CompressorEntry(
        options=SparseOptions,
        build=late("near_centroid", "near_centroid"),
        on_gpu=True,
        joins=_joins,
        merges=True,
        sends=_elements,
        nanoseconds=_selecting(3.0),
        downlink=always(CHOSEN_AGAIN),
        adam_loss=_sparse_lost({(100, 0): 1.42}),
    ),
    "krngc": CompressorEntry(
        options=KReciprocalOptions,
        build=late("k_reciprocal", "k_reciprocal"),
        wrapping=Wrapping(momentum=0.9),
        model_wide=True,
        sends=_elements,
        nanoseconds=_selecting(3.4),
        downlink=always(CHOSEN_AGAIN),
        adam_loss=_sparse_lost({(100, 5): 1.19}),
    ),
    "l1": CompressorEntry(
        options=SparseOptions,
        build=late("top_k", "top_k"),
        wrapping=WITHOUT_FEEDBACK,
        on_gpu=True,
        joins=_joins_small,
        merges=True,
        sends=_elements,
        nanoseconds=_selecting(1.6),
        adam_loss=_sparse_lost({(100, 0): 1.29}),
    ),
    "randk": CompressorEntry(
        options=RandKOptions,
        build=late("top_k", "rand_k"),
        merges=True,
        sends=_rand_k_sends,
        nanoseconds=_selecting(1.9),
        downlink=lambda options: BY_LAYERS if options.density is Density.NORM else "",
        adam_loss=_sparse_lost({(10, 0): 1.51, (100, 0): 1.54}),
    ),
    "threshold": CompressorEntry(
        options=ThresholdOptions,
        build=late("top_k", "threshold"),
        joins=always(Joined(how="neighbours")),
        merges=True,
        sends=always(BY_TAU),
        downlink=always(MEANT),
        adam_loss=lost(1.47, ThresholdOptions),
    ),
    "topk": CompressorEntry(
        options=SparseOptions,
        build=late("top_k", "top_k"),
        on_gpu=True,
        joins=_joins_small,
        merges=True,
        sends=_elements,
        nanoseconds=_selecting(1.8),
        adam_loss=_sparse_lost({(10, 0): 1.31, (100, 0): 1.41, (100, 2): 1.26}),
    ),
}
