"""Sizes of compressed gradients and updates, and the processor time that compressing takes.

A `CompressionCosts` holds the facts about a compressor that planners use. `CompressorSpec.compression` makes
it from its entry and options. No torch here, so that gc-plan answers at once.

A tensor of fewer than two dimensions travels as bfloat16, unless the compressor is dense. Updates have the
size that `--downlink auto` gives them: the workers' own quantizer for quantized pushes, and the union of the
pushed elements for sparse pushes. Predictions take these elements as chosen at random, for which the union is
largest.

Processor time is that of one core of the machine of docs/explanation/performance.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby, pairwise

from ..common.parts import LEAST_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorCoding:
    """The coding of a tensor that is worth compressing, from which its size follows.

    Attributes:
        bits: bits of an element that is sent.
        bucket: number of elements that share a scale of four bytes; 0 if there is none.
        tensor_bytes: bytes per tensor besides its elements, such as levels; without headers.
        density: fraction of the elements that is sent, 0 to 1.
        indices: True if the indices of the sent elements travel, too.
        dense: True if tensors of fewer than two dimensions are sent in this coding, too, instead of as
            bfloat16.
        together: True if neighbouring tensors share one call, and one payload, where the last bucket is full.
            A `CompressorEntry` declares that by `joins`; the value that its `sends` returns is overwritten.
        coordinates: function that returns how many numbers are sent of a tensor of a shape; 0 if it travels
            as bfloat16. None if each sent number is an element. Overwritten, too.
        packed: share of the bytes that is left after packing, as measured; 1 if it was not measured.
    """

    bits: float
    bucket: int = 0
    tensor_bytes: int = 0
    density: float = 1.0
    indices: bool = False
    dense: bool = False
    together: bool = False
    coordinates: Callable[[Sequence[int]], int] | None = None
    packed: float = 1.0

    def carries(self, shape: Sequence[int]) -> bool:
        """Return True if a tensor of this shape travels in this coding, False if it travels as bfloat16."""
        if self.coordinates is not None:
            return self.coordinates(shape) > 0
        return self.dense or len(shape) > 1

    def sent_bytes(self, shape: Sequence[int]) -> float:
        """Return the bytes of a compressed tensor of this shape, without headers."""
        if not self.carries(shape):
            return 2.0 * math.prod(shape)
        numbers = math.prod(shape) if self.coordinates is None else self.coordinates(shape)
        return self.tensor_bytes + numbers * self.element_bytes

    def packed_bytes(self, shape: Sequence[int]) -> float:
        """Return the bytes of a compressed tensor of this shape after packing, without headers."""
        return self.sent_bytes(shape) * (self.packed if self.carries(shape) else 1.0)

    def uncut(self, shapes: Sequence[Sequence[int]]) -> frozenset[int]:
        """Return the indices of the tensors that no plan may cut into parts."""
        count = self.coordinates
        return frozenset(i for i, shape in enumerate(shapes) if count is not None and count(shape))

    def calls(self, shapes: Sequence[Sequence[int]]) -> int:
        """Return the number of compressor calls that these neighbours take. All matrices take one."""
        if self.coordinates is None:
            return self.runs(shapes)
        carried = [*map(self.carries, shapes)]
        return any(carried) + sum(not each for each, _ in groupby(carried))

    def runs(self, shapes: Sequence[Sequence[int]]) -> int:
        """Return the number of payloads that these neighbouring tensors take."""
        found = 1 if shapes else 0
        for before, shape in pairwise(shapes):
            carried = self.carries(before)
            full = not self.bucket or math.prod(before) % self.bucket == 0
            found += carried != self.carries(shape) or (carried and not (self.together and full))
        return found

    @property
    def element_bytes(self) -> float:
        """Bytes per element, averaged over all elements of a tensor, sent or not; or per coordinate."""
        bits = self.bits + (32 / self.bucket if self.bucket else 0.0)
        return (self.density * bits + (index_bits(self.density) if self.indices else 0.0)) / 8


# Codings of updates that a server makes from quantized pushes, whichever compressor made the pushes.
# `packed` is of an MLP for digits with SGD: wire_bytes_up / payload_bytes_up of gc-run, without headers.
ONE_BIT = TensorCoding(bits=1, tensor_bytes=8)
BLOCK_SIGNS = TensorCoding(bits=1, bucket=4096, together=True, packed=0.92)
FOUR_BIT = TensorCoding(bits=4, tensor_bytes=28, together=True, packed=0.55)
EIGHT_BIT = TensorCoding(bits=8, bucket=4096, together=True, packed=0.61)


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressionCosts:
    """The sizes and times of a compressor, as planners know it.

    Attributes:
        up: coding of the tensors in a push.
        element_s: seconds of one core in which a worker compresses an element.
        least_part_bytes: lower bound of the default size of the largest part, as float32, in bytes.
        merges: True if it chooses from all tensors of a unit as from one, in a merged plan.
        whole: True if it needs all gradients before it compresses any.
        updates: coding of the tensors in an update; None for that of `--downlink auto`.
        for_means: True if the mean of several ranks can be sent with it, as owners do (`gradwire.ddp`).
    """

    name: str
    up: TensorCoding
    element_s: float
    least_part_bytes: int = LEAST_BYTES
    merges: bool = False
    whole: bool = False
    updates: TensorCoding | None = None
    for_means: bool = False

    def __str__(self) -> str:
        return self.name

    def down(self, pushes: int) -> TensorCoding:
        """Return the coding of the tensors in an update that the server makes from `pushes` pushes."""
        up = self.up
        if self.updates is not None:
            return self.updates
        if up.coordinates is not None:
            if up.bits >= 16:
                return up
            return replace(up, bits=8, packed=0.92)  # the mean's coordinates are rounded to 8 bits
        if up.indices or up.density < 1:
            held = 1 - (1 - up.density) ** pushes
            bits = max(up.bits, 16.0)  # values of a sparse update are bfloat16
            union = replace(up, bits=bits, bucket=0, density=held, indices=True)
            return min(union, TensorCoding(bits=bits, together=True), key=lambda each: each.element_bytes)
        if up.bits >= 16:
            return up
        if up.bits > 4:
            return EIGHT_BIT
        if up.bits > 1:
            return FOUR_BIT
        return BLOCK_SIGNS if up.bucket else ONE_BIT


# No compression. Planners compare with it, and predict modes that do not compress with it.
NONE = CompressionCosts(
    name="none",
    up=TensorCoding(bits=32, dense=True, together=True),
    element_s=0.5e-9,
    for_means=True,
)

# By default parts are large enough for a sparsifier to send at least this many bytes of each: fewer are not
# worth the messages. A sent element takes about SPARSE_BITS, index included.
LEAST_SPARSE_BYTES = 256 << 10
SPARSE_BITS = 24


def least_sparse_part_bytes(ratio: float) -> int:
    """Return the least default size of a part, in bytes as float32, if one element of `ratio` is sent."""
    return int(4 * 8 * LEAST_SPARSE_BYTES * ratio / SPARSE_BITS)


@cache  # planners call it for each tensor
def index_bits(density: float) -> float:
    """Return the size of the indices in bits, divided by the number of all elements, sent or not.

    They are coded as in `indices`. density: fraction of the elements that is sent.
    """
    if not 0 < density < 1:
        return 0.0

    def gap_bits(low_bits: int) -> float:
        q = math.exp(2**low_bits * math.log1p(-density))
        return low_bits + 1 + q / (1 - q)

    return min(1.0, density * min(map(gap_bits, range(32))))


# Packing of the bytes that are sent (`packing`): zstd's fastest level that codes literals.
PACKING_LEVEL = 1
PACKING_BYTES_PER_S = 1e9  # of one core, whether the bytes shrink or not
PACKING_START_S = 20e-6  # for each frame, at both ends
LEAST_PACKED_BYTES = 512
LEAST_SAVED = 1 / 20  # of the bytes

# For `gradwire.ddp`.
# Saved bytes per rank and step from which a second stage is worth its messages and its work on each tensor,
# on a link of 1 Gbit/s.
SAVED_BYTES, SAVED_BYTES_PER_TENSOR = 64 << 10, 12 << 10

# Packing pays on a link of less than this share of its own rate: it saves about 0.4 of the bytes, and a rank
# packs and unpacks about twice as many as it sends.
PACKING_SHARE = 0.2


def exchange_of(sent: float, ranks: int, tensors: int) -> tuple[bool, float, float]:
    """Return True if owners save enough bytes, and the bytes per rank and step of a gather and of owners.

    sent: bytes of a rank's gradients.
    """
    gathered, owned = (ranks - 1) * sent, 2 * (ranks - 1) * sent / ranks
    return gathered - owned >= SAVED_BYTES + SAVED_BYTES_PER_TENSOR * tensors, gathered, owned
