"""The compressors that send every element: their options and their declarations.

Formulas and sources stand in the file of each compressor, which `build` imports.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

from .entry import WITH_FEEDBACK, WITHOUT_FEEDBACK, CompressorEntry, Joined, NoOptions
from .payload import BUCKET_STEP, MAX_BUCKET, DenseFormat, check_linear
from .sizes import BLOCK_SIGNS, EIGHT_BIT, FOUR_BIT, NONE, ONE_BIT, TensorCoding
from .wrapping import Wrapping

if TYPE_CHECKING:
    from collections.abc import Callable

    from .base import Compressor

T = TypeVar("T")

MEANT = "its thresholds are meant for gradients, and updates are smaller by the learning rate"
LARGER_ERROR = "its error is larger than the update"


class Scale(StrEnum):
    """The gradient to which absolute thresholds apply: the sum over the samples, or PyTorch's mean.

    The thresholds of MXNet and of the 4-bit paper come from a system whose gradient is the *sum* over the
    batch. PyTorch's is the mean, smaller by the number of samples. Applied to it as printed, the thresholds
    are too coarse by that factor. (Not in the paper: an erratum of ours.)

    SUM: thresholds apply to gradient * samples. We divide the thresholds instead of multiplying the gradient:
    the residual stays in the domain of the mean, and the receiver need not know about it. The codes are the
    same, except for values within a rounding of a threshold where samples is no power of two.
    MEAN: thresholds apply to PyTorch's gradient.
    """

    SUM = "sum"
    MEAN = "mean"

    def factor(self, samples: int) -> float:
        """Return the factor between the gradient to which thresholds apply and PyTorch's."""
        return float(samples) if self is Scale.SUM else 1.0


def check_threshold(name: str, value: float) -> None:
    """Raise ValueError for a threshold that could become 0 or infinite when divided by the samples."""
    if not 1e-20 <= value <= 1e20:
        raise ValueError(f"{name}: expected a number from 1e-20 to 1e20, got {value}")


@dataclass(frozen=True, kw_only=True, slots=True)
class TwoBitOptions:
    """The options of `2bit`.

    Attributes:
        threshold: threshold of the magnitude, and magnitude of every value sent; 0.5 is MXNet's default.
        scale: gradient to which the threshold applies, the sum over the samples or the mean.
    """

    threshold: float = 0.5
    scale: Scale = Scale.SUM

    def __post_init__(self) -> None:
        check_threshold("threshold", self.threshold)


class Levels(StrEnum):
    """The rules for the seven thresholds of `4bit`; see the head of `four_bit`."""

    GROUPS = "groups"
    GROUP1 = "group1"
    RUNNING = "running"


@dataclass(frozen=True, kw_only=True, slots=True)
class FourBitOptions:
    """The options of `4bit`.

    Attributes:
        levels: rule for the thresholds.
        scale: gradient to which fixed thresholds apply, the sum over the samples or the mean; no effect with
            `levels=running`.
    """

    levels: Levels = Levels.RUNNING
    scale: Scale = Scale.SUM


class Norm(StrEnum):
    """The norm of a bucket that its outermost level equals: the largest magnitude, or the Euclidean norm."""

    MAX = "max"
    L2 = "l2"


@dataclass(frozen=True, kw_only=True, slots=True)
class QsgdOptions:
    """The options of `qsgd`.

    Attributes:
        bits: bits of a code, sign included.
        bucket: number of elements that share a scale.
        norm: norm of a bucket that its outermost level equals.
    """

    bits: int = 4
    bucket: int = 512
    norm: Norm = Norm.MAX

    def __post_init__(self) -> None:
        check_linear(self.bits, self.bucket, fewest=2)


@dataclass(frozen=True, kw_only=True, slots=True)
class OneBitOptions:
    """The options of `1bit`.

    Attributes:
        block: number of elements that share a scale, the mean magnitude; 0 for the two means of a tensor.
    """

    block: int = 0

    def __post_init__(self) -> None:
        if self.block and (not BUCKET_STEP <= self.block <= MAX_BUCKET or self.block % BUCKET_STEP):
            limit = f"0, or a multiple of {BUCKET_STEP} from {BUCKET_STEP} to {MAX_BUCKET}"
            raise ValueError(f"block: expected {limit}, got {self.block}")


class VoteLevel(StrEnum):
    """The magnitude of a vote of `signsgd`: the mean of |g|, or 1."""

    MEAN = "mean"
    UNIT = "unit"


@dataclass(frozen=True, kw_only=True, slots=True)
class SignOptions:
    """The options of `signsgd`.

    Attributes:
        level: magnitude by which the sign of the majority is multiplied.
    """

    level: VoteLevel = VoteLevel.MEAN


@dataclass(frozen=True, kw_only=True, slots=True)
class TernGradOptions:
    """The options of `terngrad`.

    Attributes:
        sigmas: number of standard deviations, taken around 0, at which values are clipped.
    """

    sigmas: float = 2.5

    def __post_init__(self) -> None:
        if not 0.1 <= self.sigmas <= 1e6:
            raise ValueError(f"sigmas: expected 0.1 to 1e6 standard deviations, got {self.sigmas:g}")


def late(module: str, name: str) -> Callable[[Any], Compressor]:
    """Return a `build` function that calls `name` of a module of this room, importing it, and with it torch,
    only then."""

    def build(options: Any) -> Compressor:
        made: Compressor = getattr(import_module(f".{module}", __package__), name)(options=options)
        return made

    return build


def always(value: T) -> Callable[[Any], T]:
    return lambda options: value


def lost(loss: float, kind: type[Any] = NoOptions) -> Callable[[Any], float | None]:
    """Return a function for `adam_loss` or `sgd_accuracy`: `loss` for the default options of `kind`, and None
    for all others."""
    return lambda options: loss if options == kind() else None


def _dense(
    format: DenseFormat,
    sends: TensorCoding,
    nanoseconds: float,
    loss: float,
    wrapping: Wrapping | None = WITH_FEEDBACK,
) -> CompressorEntry:

    def build(options: NoOptions) -> Compressor:
        from .dense import Dense

        return Dense(format=format)

    return CompressorEntry(
        options=NoOptions,
        build=build,
        wrapping=wrapping,
        dense=True,
        joins=always(Joined(how="elements")),
        sends=always(sends),
        nanoseconds=always(nanoseconds),
        adam_loss=lost(loss),
        sgd_accuracy=always(0.0),
    )


DENSE: Mapping[str, CompressorEntry] = {
    "none": _dense(DenseFormat.FLOAT32, NONE.up, 0.5, 1.0, wrapping=None),
    "bf16": _dense(DenseFormat.BFLOAT16, TensorCoding(bits=16, dense=True, packed=0.7), 0.5, 1.001),
    "fp16": _dense(DenseFormat.FLOAT16, TensorCoding(bits=16, dense=True, packed=0.76), 0.6, 1.003),
}

QUANTIZERS: Mapping[str, CompressorEntry] = {
    "1bit": CompressorEntry(
        options=OneBitOptions,
        build=late("one_bit", "one_bit"),
        joins=lambda options: Joined(how="neighbours", full=options.block) if options.block else None,
        sends=lambda options: replace(BLOCK_SIGNS, bucket=options.block) if options.block else ONE_BIT,
        nanoseconds=always(0.9),
        adam_loss=lost(1.56, OneBitOptions),
        sgd_accuracy=lost(-0.004, OneBitOptions),
    ),
    "2bit": CompressorEntry(
        options=TwoBitOptions,
        build=late("two_bit", "TwoBit"),
        on_gpu=True,
        joins=always(Joined(how="blocks")),
        sends=always(TensorCoding(bits=2, tensor_bytes=4, packed=0.25)),
        nanoseconds=always(0.6),
        downlink=always(MEANT),
        adam_loss=lost(1.56, TwoBitOptions),
        sgd_accuracy=lost(-0.006, TwoBitOptions),
    ),
    "4bit": CompressorEntry(
        options=FourBitOptions,
        build=late("four_bit", "FourBit"),
        on_gpu=True,
        # The paper's groups need the mean of the present gradient, which is not known before it is read.
        joins=lambda options: None if options.levels is Levels.GROUPS else Joined(how="blocks"),
        sends=always(FOUR_BIT),
        nanoseconds=always(0.5),
        downlink=lambda options: "" if options.levels is Levels.RUNNING else f"{MEANT}; use levels=running",
        adam_loss=lambda options: 1.06 if options.levels is Levels.RUNNING else None,
        adam_loss_otherwise=1.013,
        sgd_accuracy=lost(0.001, FourBitOptions),
    ),
    "8bit": CompressorEntry(
        options=NoOptions,
        build=late("linear", "eight_bit"),
        # Where the last bucket is full, the next bucket begins with the next tensor.
        joins=always(Joined(how="neighbours", full=EIGHT_BIT.bucket)),
        sends=always(EIGHT_BIT),
        nanoseconds=always(0.6),
        adam_loss=lost(1.009),
        sgd_accuracy=always(0.0),
    ),
    "qsgd": CompressorEntry(
        options=QsgdOptions,
        build=late("linear", "qsgd"),
        wrapping=WITHOUT_FEEDBACK,
        sends=lambda options: TensorCoding(bits=options.bits, bucket=options.bucket, packed=0.56),
        nanoseconds=always(0.8),
        downlink=lambda options: (
            ""
            if options.norm is Norm.MAX and options.bits >= 4
            else f"{LARGER_ERROR}; use norm=max and bits of at least 4"
        ),
        adam_loss=lost(1.014, QsgdOptions),
        sgd_accuracy=lost(-0.001, QsgdOptions),
    ),
    "signsgd": CompressorEntry(
        options=SignOptions,
        build=late("one_bit", "SignVote"),
        wrapping=WITHOUT_FEEDBACK,
        sends=always(TensorCoding(bits=1, tensor_bytes=4, packed=0.76)),
        nanoseconds=always(0.8),
        downlink=always("it needs several voters, and an update has one sender"),
        adam_loss=lost(1.17, SignOptions),
        sgd_accuracy=lost(-0.041, SignOptions),
    ),
    "terngrad": CompressorEntry(
        options=TernGradOptions,
        build=late("linear", "TernGrad"),
        wrapping=WITHOUT_FEEDBACK,
        sends=always(TensorCoding(bits=2, tensor_bytes=4, packed=0.49)),
        nanoseconds=always(0.9),
        downlink=always(LARGER_ERROR),
        adam_loss=lost(1.06, TernGradOptions),
        sgd_accuracy=lost(-0.002, TernGradOptions),
    ),
}
