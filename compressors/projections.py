"""The compressors that send coordinates in bases: their options and their declarations (`bases`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from .entry import CompressorEntry
from .quantizers import always, late
from .sizes import TensorCoding

FEWER = 2  # a matrix has at least this many times as many elements as coordinates, or travels as bfloat16
BUCKET = 128  # coordinates that share a scale


class Factors(StrEnum):
    """The formats of coordinates."""

    FLOAT16 = "fp16"
    EIGHT_BIT = "8bit"
    FOUR_BIT = "4bit"

    @property
    def bits(self) -> int:
        return {Factors.FLOAT16: 16, Factors.EIGHT_BIT: 8}.get(self, 4)


@dataclass(frozen=True, kw_only=True, slots=True)
class LowRankOptions:
    """The options of `lowrank`.

    Attributes:
        rank: number of basis vectors over rows, and over columns, of each matrix.
        values: format of the coordinates.
    """

    rank: int = 4
    values: Factors = Factors.FOUR_BIT

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= 256:
            raise ValueError(f"rank: expected 1 to 256, got {self.rank}")

    def coordinates(self, shape: Sequence[int]) -> int:
        """Return the number of coordinates of a tensor of this shape, as a matrix with a row for each index
        of the first dimension; 0 if they are not clearly fewer than its elements."""
        if len(shape) < 2:
            return 0
        rows, columns = shape[0], math.prod(shape[1:])
        count = self.rank * (rows + columns)
        return count if FEWER * count <= rows * columns else 0


def _coordinates(options: LowRankOptions) -> Callable[[Sequence[int]], int]:
    return options.coordinates


# `adam_loss`, by rank and format: records/2026-11-lowrank.md.
LOSSES = {
    (4, Factors.FOUR_BIT): 1.14,
    (4, Factors.EIGHT_BIT): 1.11,
    (8, Factors.FOUR_BIT): 1.10,
    (8, Factors.EIGHT_BIT): 1.04,
}


def _sends(options: LowRankOptions) -> TensorCoding:
    bucket = 0 if options.values is Factors.FLOAT16 else BUCKET
    packed = {Factors.FOUR_BIT: 0.88, Factors.EIGHT_BIT: 0.92}.get(options.values, 1.0)
    return TensorCoding(bits=options.values.bits, bucket=bucket, packed=packed)


PROJECTIONS: Mapping[str, CompressorEntry] = {
    "lowrank": CompressorEntry(
        options=LowRankOptions,
        build=late("low_rank", "LowRank"),
        on_gpu=True,
        sends=_sends,
        # With gc-server, three seeds of an MLP: records/2026-11-lowrank.md.
        sgd_accuracy=lambda options: -0.005 if options == LowRankOptions() else None,
        nanoseconds=always(2.0),
        coordinates=_coordinates,
        downlink=always("an update has no bases of its own; its coordinates travel as the pushes' do"),
        adam_loss=lambda options: LOSSES.get((options.rank, options.values)),
    ),
}
