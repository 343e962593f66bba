"""Sizes of compressed gradients and updates, and the processor time that compressing takes.

A `CompressionCosts` is the declaration of a compressor as planners need it. `compressors.registry` makes one
of the compressor's entry and options, so this room names no compressor but those that it predicts with
itself.

A tensor of fewer than two dimensions travels as bfloat16, unless the compressor is dense. Updates take what
`--downlink auto` makes of the pushes: the workers' own quantizer, or of sparse pushes the elements that they
held. Predictions take these as chosen at random, which is the most that they can be.

Processor time is that of one core of the machine of docs/explanation/performance.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

from .parts import LEAST_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorCoding:
    """Bytes of a tensor that is worth compressing.

    Attributes:
        bits: of an element that is sent.
        bucket: elements that share a scale of four bytes; 0 if there is none.
        tensor_bytes: per tensor, such as levels; without headers.
        density: share of the elements that are sent.
        indices: whether the indices of these travel, too.
        dense: whether tensors of fewer than two dimensions are sent so, too, instead of as bfloat16.
        together: whether neighbouring tensors share one call, and one payload, where the last bucket is full.
            A `CompressorEntry` says so by `joins`, and what its `sends` says of it does not count.
    """

    bits: float
    bucket: int = 0
    tensor_bytes: int = 0
    density: float = 1.0
    indices: bool = False
    dense: bool = False
    together: bool = False

    def carries(self, shape: Sequence[int]) -> bool:
        """Return whether a tensor travels so; the others travel as bfloat16."""
        return self.dense or len(shape) > 1

    def sent_bytes(self, shape: Sequence[int]) -> float:
        """Return the bytes of a tensor."""
        elements = math.prod(shape)
        return self.tensor_bytes + elements * self.element_bytes if self.carries(shape) else 2.0 * elements

    def runs(self, shapes: Sequence[Sequence[int]]) -> int:
        """Return the number of calls, and of payloads, that neighbouring tensors take."""
        found = 1 if shapes else 0
        for before, shape in pairwise(shapes):
            carried = self.carries(before)
            full = not self.bucket or math.prod(before) % self.bucket == 0
            found += carried != self.carries(shape) or (carried and not (self.together and full))
        return found

    @property
    def element_bytes(self) -> float:
        """The average over all elements, sent or not."""
        bits = self.bits + (32 / self.bucket if self.bucket else 0.0)
        return (self.density * bits + (index_bits(self.density) if self.indices else 0.0)) / 8


# What a server sends of quantized pushes, whichever compressor made them.
ONE_BIT = TensorCoding(bits=1, tensor_bytes=8)
FOUR_BIT = TensorCoding(bits=4, tensor_bytes=28, together=True)
EIGHT_BIT = TensorCoding(bits=8, bucket=4096, together=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressionCosts:
    """A compressor as planners know it.

    Attributes:
        name: spec of the compressor, `name[:key=value,...]`.
        up: size of a push.
        element_s: seconds of one core that a worker takes for an element.
        least_part_bytes: the largest part holds at least this by default, as float32.
        merges: whether a unit of a merged plan is one tensor to it.
        whole: whether it needs all gradients before it compresses any.
    """

    name: str
    up: TensorCoding
    element_s: float
    least_part_bytes: int = LEAST_BYTES
    merges: bool = False
    whole: bool = False

    def __str__(self) -> str:
        return self.name

    def down(self, pushes: int) -> TensorCoding:
        """Return the size of an update that is made of `pushes` pushes."""
        up = self.up
        if up.indices or up.density < 1:
            held = 1 - (1 - up.density) ** pushes
            bits = max(up.bits, 16.0)  # values that are not dense come down as bfloat16
            union = replace(up, bits=bits, bucket=0, density=held, indices=True)
            return min(union, TensorCoding(bits=bits, together=True), key=lambda each: each.element_bytes)
        if up.bits >= 16:
            return up
        if up.bits > 4:
            return EIGHT_BIT
        return FOUR_BIT if up.bits > 1 else ONE_BIT


# No compression: planners compare with it, and modes that do not compress are predicted with it.
NONE = CompressionCosts(name="none", up=TensorCoding(bits=32, dense=True, together=True), element_s=0.5e-9)

# A sparsifier sends at least this much of a part by default: less is not worth its messages. An element that
# it keeps takes about SPARSE_BITS.
LEAST_SPARSE_BYTES = 256 << 10
SPARSE_BITS = 24


def least_sparse_part_bytes(ratio: float) -> int:
    """Return what the largest part holds by default, as float32, where one element of `ratio` is sent."""
    return int(4 * 8 * LEAST_SPARSE_BYTES * ratio / SPARSE_BITS)


@cache  # it is asked for tensor by tensor
def index_bits(density: float) -> float:
    """Return the bits, per element, sent or not, that say which elements are sent.

    They are Golomb-Rice codes of the gaps between these, or a bit per element, as in `compressors.indices`.
    """
    if not 0 < density < 1:
        return 0.0

    def gap_bits(low_bits: int) -> float:
        q = math.exp(2**low_bits * math.log1p(-density))
        return low_bits + 1 + q / (1 - q)

    return min(1.0, density * min(map(gap_bits, range(32))))
