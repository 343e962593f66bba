"""The compressors that send some elements: their options and their declarations.

Formulas and sources stand in the file of each compressor, which `build` imports, and in `sparse`, which they
share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np

from .entry import WITHOUT_FEEDBACK, CompressorEntry, Joined
from .quantizers import MEANT, Scale, always, check_threshold, late, lost
from .sizes import TensorCoding
from .wrapping import Wrapping

if TYPE_CHECKING:
    from .base import StepContext

CHOSEN_AGAIN = "elements that were sent are 0 afterwards, and it may choose them again"
BY_LAYERS = "densities by norms are for the gradients of workers"
BY_NORMS = "the number of elements that it sends of a tensor follows from the norm of its parameters"
# A tensor with more elements is compressed faster by itself. In one thread, a run took these multiples of the
# CPU time of single calls: 0.8 to 0.9 at 48 Ki elements a tensor, 0.9 to 1.2 at 64 Ki, 1.1 to 1.5 at 128 Ki,
# and up to 2.3 at 256 Ki.
ALONE = 3 << 14
BY_TAU = "the number of elements that reach tau is not known before a step"


class Values(StrEnum):
    """The formats of the values of chosen elements."""

    FLOAT32 = "float32"
    BFLOAT16 = "bf16"
    FLOAT16 = "fp16"
    EIGHT_BIT = "8bit"
    FOUR_BIT = "4bit"
    ONE_BIT = "1bit"

    @property
    def bits(self) -> int:
        return {Values.FLOAT32: 32, Values.EIGHT_BIT: 8, Values.FOUR_BIT: 4, Values.ONE_BIT: 1}.get(self, 16)


class Ramp(StrEnum):
    """The course of the ratio over the epochs of a warm-up: it grows exponentially, or everything is sent.

    The thesis on near-centroid compression calls five epochs of them wm5 and wm5o (section 4.3.2).
    """

    EXPONENTIAL = "exponential"
    DENSE = "dense"


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseOptions:
    """The options that all sparsifiers share.

    Attributes:
        ratio: number of elements per kept element, at least 1.
        warmup: number of epochs over which the ratio grows to its full value.
        ramp: course of the ratio in these epochs.
        values: format of the values.
    """

    ratio: float = 100.0
    warmup: int = 0
    ramp: Ramp = Ramp.EXPONENTIAL
    values: Values = Values.BFLOAT16

    def __post_init__(self) -> None:
        if not 1 <= self.ratio <= 1e9:
            raise ValueError(f"ratio: expected a number from 1 to 1e9, got {self.ratio:g}")
        if not 0 <= self.warmup <= 10_000:
            raise ValueError(f"warmup: expected 0 to 10000 epochs, got {self.warmup}")

    def densities(self, norms: Sequence[float]) -> list[float] | None:
        """Return the fraction of elements that each tensor sends after the warm-up; None if `norms` do not
        affect it.

        norms: Euclidean norm of the first parameters of each tensor.
        """
        return None

    def ratio_at(self, epoch: float, density: float | None = None) -> float:
        """Return the ratio at an epoch: it grows exponentially to `ratio`, or to 1 / `density` if that is
        given; with a dense ramp it is 1 until the warm-up ends.

        The formula of the exponential ramp is ratio**((epoch + 1) / (warmup + 1)). For ratio 1000 and 4
        epochs these are the steps of DGC: 75, 93.75, 98.4, 99.6 and then 99.9 % of the elements are not sent.
        """
        ratio = self.ratio if density is None else 1 / density
        if epoch >= self.warmup:
            return ratio
        if self.ramp is Ramp.DENSE:
            return 1.0
        return float(ratio ** ((int(epoch) + 1) / (self.warmup + 1)))

    def keep(self, elements: int, epoch: float, density: float | None = None) -> int:
        """Return the number of elements to send of a tensor: elements / ratio, rounded down, at least one of
        a non-empty tensor.

        Source: (3-8) of the thesis on near-centroid compression. density: fraction to send after the warm-up;
        None for 1 / `ratio`.
        """
        return min(elements, max(1, int(elements / self.ratio_at(epoch, density))))


@dataclass(frozen=True, kw_only=True, slots=True)
class DgcOptions(SparseOptions):
    """The options of `dgc`: those of every sparsifier, with the paper's four epochs of warm-up."""

    warmup: int = 4


class Reading(StrEnum):
    """The two readings of equation 4-8 of `krngc`; see the head of `k_reciprocal`."""

    DISTINCT = "distinct"
    LITERAL = "literal"


@dataclass(frozen=True, kw_only=True, slots=True)
class KReciprocalOptions(SparseOptions):
    """The options of `krngc`, with the paper's warm-up.

    Attributes:
        kappa: exponent by which a layer's FLOPs count against its elements; at 0 magnitude alone decides.
        reading: distinct or literal reading of the paper's equation (4-8); `k_reciprocal` explains both.
    """

    warmup: int = 5
    kappa: float = 0.1
    reading: Reading = Reading.DISTINCT

    def __post_init__(self) -> None:
        # super() fails here: a dataclass with slots is another class than the one in which this was defined.
        SparseOptions.__post_init__(self)
        if not 0 <= self.kappa <= 10:
            raise ValueError(f"kappa: expected 0 to 10, got {self.kappa:g}")


class Draw(StrEnum):
    """The way in which `randk` draws k elements: one in each of k equal ranges, or any k of them."""

    STRATIFIED = "stratified"
    UNIFORM = "uniform"


class Density(StrEnum):
    """The rule for the fraction of a tensor's elements that `randk` sends: 1 / ratio, or by the norm of its
    parameters."""

    RATIO = "ratio"
    NORM = "norm"


# Fraction sent of the tensor with the least norm, and of the one with the largest norm. Source: SEAMGS-SGD,
# section 3.2.
DENSITIES = 0.001, 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class RandKOptions(SparseOptions):
    """The options of `randk`.

    Attributes:
        draw: way in which elements are drawn.
        density: rule for the number of elements of each tensor; by norms, `ratio` is ignored.
    """

    draw: Draw = Draw.STRATIFIED
    density: Density = Density.RATIO

    def densities(self, norms: Sequence[float]) -> list[float] | None:
        """Return the fraction of elements that each tensor sends, linear in the norm of its parameters; None
        with `density=ratio`.

        The paper gives the range of `DENSITIES` only; linear is our reading. If all norms are equal, it is
        the middle.
        """
        if self.density is Density.RATIO:
            return None
        (least, most), (low, high) = DENSITIES, (min(norms), max(norms))
        positions = [(norm - low) / (high - low) if high > low else 0.5 for norm in norms]
        return [least + (most - least) * position for position in positions]


@dataclass(frozen=True, kw_only=True, slots=True)
class ThresholdOptions:
    """The options of `threshold`.

    Attributes:
        tau: threshold of the magnitude, and magnitude of every value sent.
        scale: gradient to which tau applies, the sum over the samples or the mean; see `Scale`.
    """

    tau: float = 0.1
    scale: Scale = Scale.SUM

    def __post_init__(self) -> None:
        check_threshold("tau", self.tau)

    def level(self, context: StepContext) -> float:
        return float(np.float32(self.tau / self.scale.factor(context.samples)))


def _elements(options: SparseOptions, *, indices: bool = True) -> TensorCoding:
    return TensorCoding(
        bits=options.values.bits,
        bucket=4096 if options.values is Values.EIGHT_BIT else 0,
        density=1 / options.ratio,
        indices=indices,
        packed=0.86 if options.values.bits >= 16 else 0.9,
    )


def _joins(options: SparseOptions, *, most: int | None = None) -> Joined | None:
    """One call serves neighbours if each value is coded independently."""
    return Joined(how="neighbours", most=most) if options.values.bits >= 16 else None


def _joins_small(options: SparseOptions) -> Joined | None:
    """One call serves small neighbours, where a sparsifier adds and selects in one pass: for a large tensor
    that pass saves more than a shared call."""
    return _joins(options, most=ALONE)


def _rand_k_sends(options: RandKOptions) -> TensorCoding | str:
    if options.density is Density.NORM:
        return BY_NORMS
    return _elements(options, indices=False)


def _selecting(nanoseconds: float) -> Callable[[SparseOptions], float]:
    """Return a function for `nanoseconds`, from the time measured at 1 % of the elements plus one nanosecond.

    The nanosecond is added because four workers that select at the same time on two cores take longer.
    """
    return lambda options: nanoseconds + 0.15 * (100 / options.ratio - 1)


def _sparse_lost(measured: Mapping[tuple[int, int], float]) -> Callable[[SparseOptions], float | None]:
    """Return a function for `adam_loss`, from losses measured by (ratio, epochs of warm-up).

    A larger ratio or a shorter warm-up loses at least as much as a measured one.
    """

    def lost(options: SparseOptions) -> float | None:
        losses = [
            loss
            for (ratio, warmup), loss in measured.items()
            if options.ratio >= ratio and options.warmup <= warmup
        ]
        return max(losses) if losses else None

    return lost


def _sparse_accuracy(measured: Mapping[int, float]) -> Callable[[SparseOptions], float | None]:
    """Return a function for `sgd_accuracy`, from differences measured by ratio: the one at the next larger
    ratio, which is no better; None above all of them."""

    def difference(options: SparseOptions) -> float | None:
        ratios = [ratio for ratio in measured if ratio >= options.ratio]
        return measured[min(ratios)] if ratios else None

    return difference


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
        sgd_accuracy=_sparse_accuracy({10: 0.009, 100: 0.016}),
    ),
    # CHOSEN_AGAIN: an element that was sent is 0, which may be farthest from the median or at an end.
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
        sgd_accuracy=_sparse_accuracy({10: -0.002, 100: -0.01}),
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
        sgd_accuracy=_sparse_accuracy({10: 0.006, 100: 0.01}),
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
        sgd_accuracy=_sparse_accuracy({10: -0.024, 100: -0.219}),
    ),
    "randk": CompressorEntry(
        options=RandKOptions,
        build=late("top_k", "rand_k"),
        merges=True,
        sends=_rand_k_sends,
        nanoseconds=_selecting(1.9),
        downlink=lambda options: BY_LAYERS if options.density is Density.NORM else "",
        adam_loss=_sparse_lost({(10, 0): 1.51, (100, 0): 1.54}),
        sgd_accuracy=_sparse_accuracy({10: -0.007, 100: -0.21}),
    ),
    "threshold": CompressorEntry(
        options=ThresholdOptions,
        build=late("top_k", "threshold"),
        joins=always(Joined(how="neighbours")),
        merges=True,
        sends=always(BY_TAU),
        downlink=always(MEANT),
        adam_loss=lost(1.47, ThresholdOptions),
        sgd_accuracy=lost(-0.023, ThresholdOptions),
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
        sgd_accuracy=_sparse_accuracy({10: 0.001, 100: -0.008}),
    ),
}
