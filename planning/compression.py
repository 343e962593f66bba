"""What a compressor sends and takes, known from its spec alone: bytes up and down, processor time.

A tensor of fewer than two dimensions travels as bfloat16, unless the compressor is dense. What goes down is
what `--downlink auto` makes of the pushes: the workers' own quantizer, or of sparse pushes the elements that
they held, which are chosen from at random here: the most that it can be. The tests hold the bytes against
what the compressors themselves send of noise.

Seconds are of one core of the machine of docs/performance.md, see `NANOSECONDS`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

from ..spec import Spec, SpecError, known, parse_spec, unknown
from .parts import LEAST_BYTES

VALUE_BITS = {"float32": 32.0, "bf16": 16.0, "fp16": 16.0, "8bit": 8.0, "4bit": 4.0, "1bit": 1.0}
SPARSE = ("dgc", "gcac", "krngc", "l1", "randk", "topk")
# Of an element in one thread, from what a worker's call takes for 25 million with two of them, by `gc-bench
# compressors`. Of a sparsifier at 1 %, and a nanosecond more than that: four workers that select at the same
# time on two cores take longer.
NANOSECONDS = {
    **{"none": 0.5, "bf16": 0.5, "fp16": 0.6, "8bit": 0.6, "4bit": 0.5, "2bit": 0.6, "1bit": 0.9},
    **{"qsgd": 0.8, "signsgd": 0.8, "terngrad": 0.9},
    **{"topk": 1.8, "l1": 1.6, "randk": 1.9, "gcac": 3.0, "dgc": 2.8, "krngc": 3.4},
}
NANOSECONDS_PER_PERCENT = 0.15


@dataclass(frozen=True, kw_only=True, slots=True)
class Coding:
    """How one way carries a tensor that is worth compressing.

    Attributes:
        name: of the compressor, with its options.
        bits: of an element that is sent.
        tensor_bytes: of each tensor besides, its levels; headers are not counted.
        density: share of the elements that are sent.
        indices: whether it has to be said which.
        dense: it carries small tensors too.
        together: neighbours take one call, and one payload.
    """

    name: str
    bits: float
    tensor_bytes: int = 0
    density: float = 1.0
    indices: bool = False
    dense: bool = False
    together: bool = True

    def carries(self, shape: Sequence[int]) -> bool:
        """Whether a tensor travels so; the others as bfloat16."""
        return self.dense or len(shape) > 1

    def sent_bytes(self, shape: Sequence[int]) -> float:
        """Of a tensor."""
        elements = math.prod(shape)
        return self.tensor_bytes + elements * self.element_bytes if self.carries(shape) else 2.0 * elements

    def runs(self, shapes: Sequence[Sequence[int]]) -> int:
        """How many calls, and payloads, neighbouring tensors take."""
        kinds = [self.carries(shape) for shape in shapes]
        if not kinds:
            return 0
        apart = 0 if self.together else sum(before and kind for before, kind in pairwise(kinds))
        return 1 + apart + sum(before != kind for before, kind in pairwise(kinds))

    @property
    def element_bytes(self) -> float:
        """On average over all elements, sent or not."""
        return (self.density * self.bits + (index_bits(self.density) if self.indices else 0.0)) / 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Compression:
    """up: of a push. element_s: that a worker takes for each element, on one core. least_part_bytes: as
    float32, of the largest part by default."""

    up: Coding
    element_s: float
    least_part_bytes: int = LEAST_BYTES

    def down(self, pushes: int) -> Coding:
        """Of an update made of so many pushes."""
        up = self.up
        if up.indices or up.density < 1:
            held = 1 - (1 - up.density) ** pushes
            bits = up.bits if up.bits >= 16 else 16.0  # what is not dense comes down as bfloat16
            union = replace(up, bits=bits, density=held, indices=True)
            whole = Coding(name="values", bits=bits)
            return min(union, whole, key=lambda each: each.element_bytes)
        match up.name:
            case "signsgd" | "1bit":
                return ONE_BIT
            case "2bit" | "terngrad":
                return FOUR_BIT
            case "qsgd":
                return FOUR_BIT if up.bits < 5 else EIGHT_BIT
            case _:
                return up


ONE_BIT = Coding(name="1bit", bits=1, tensor_bytes=8, together=False)
FOUR_BIT = Coding(name="4bit", bits=4, tensor_bytes=28)
EIGHT_BIT = Coding(name="8bit", bits=8 + 32 / 4096, together=False)
CODINGS: Mapping[str, Coding] = {
    "none": Coding(name="none", bits=32, dense=True),
    "bf16": Coding(name="bf16", bits=16, dense=True),
    "fp16": Coding(name="fp16", bits=16, dense=True),
    "1bit": ONE_BIT,
    "2bit": Coding(name="2bit", bits=2, tensor_bytes=4),
    "4bit": FOUR_BIT,
    "8bit": EIGHT_BIT,
    "signsgd": replace(ONE_BIT, name="signsgd", tensor_bytes=4),
    "terngrad": Coding(name="terngrad", bits=2, tensor_bytes=4, together=False),
}
NAMES = (*CODINGS, "qsgd", *SPARSE)


def compression(text: str) -> Compression:
    """Of a compressor's spec, at its full ratio, without its warm-up.

    Raises:
        SpecError: nothing is known of that compressor, or of an option's value.
    """
    spec = parse_spec("compressor", text)
    if spec.name not in NAMES:
        raise SpecError(unknown("compressor", spec.name, NAMES))
    nanoseconds, least = NANOSECONDS[spec.name], LEAST_BYTES
    if spec.name in SPARSE:
        ratio = _number(spec, "ratio", 100.0, least=1.0)
        values = spec.options.get("values", "bf16")
        if values not in VALUE_BITS:
            raise SpecError(
                f"compressor {text!r}: values: expected one of {known(VALUE_BITS)}, got {values!r}"
            )
        bits = VALUE_BITS[values] + (32 / 4096 if values == "8bit" else 0.0)
        up = Coding(name=spec.name, bits=bits, density=1 / ratio, indices=spec.name != "randk")
        up = replace(up, together=spec.name not in ("randk", "krngc") and bits >= 16)
        nanoseconds += NANOSECONDS_PER_PERCENT * (100 / ratio - 1)
        least = max(least, least_sparse_part_bytes(ratio))
    elif spec.name == "qsgd":
        bits, bucket = _number(spec, "bits", 4.0, least=2.0), _number(spec, "bucket", 512.0, least=1.0)
        up = Coding(name=spec.name, bits=bits + 32 / bucket, together=False)
    else:
        up = CODINGS[spec.name]
    return Compression(up=up, element_s=max(nanoseconds, 0.3) * 1e-9, least_part_bytes=least)


# What a sparsifier sends of a part by default is at least so much: less is not worth its messages. An element
# that it keeps takes about so many bits.
LEAST_SPARSE_BYTES = 256 << 10
SPARSE_BITS = 24


def least_sparse_part_bytes(ratio: float) -> int:
    """What the largest part has to hold by default, as float32, where one element of `ratio` is sent."""
    return int(4 * 8 * LEAST_SPARSE_BYTES * ratio / SPARSE_BITS)


@cache  # it is asked for tensor by tensor
def index_bits(density: float) -> float:
    """For each element, sent or not, to say which are sent: Golomb-Rice codes of the gaps between them, or a
    bit for each element, as `compressors.indices` has it."""
    if not 0 < density < 1:
        return 0.0

    def gap_bits(low_bits: int) -> float:
        q = math.exp(2**low_bits * math.log1p(-density))
        return low_bits + 1 + q / (1 - q)

    return min(1.0, density * min(map(gap_bits, range(32))))


def _number(spec: Spec, key: str, default: float, *, least: float) -> float:
    text = spec.options.get(key)
    try:
        found = default if text is None else float(text)
    except ValueError:
        found = math.nan
    if not least <= found < math.inf:
        raise SpecError(f"compressor {spec.name!r}: {key}: expected a number from {least:g}, got {text!r}")
    return found
