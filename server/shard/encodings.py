"""`auto` learns here from pushes in which kind each tensor came, and which elements they hold."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...compressors import (
    AbsentPayload,
    CompressorSpec,
    DenseFormat,
    DensePayload,
    Indices,
    LinearPayload,
    Payload,
    QuantizedPayload,
    SparsePayload,
    decode_indices,
    max_index_bytes,
)
from .mean import Payloads

Int64 = npt.NDArray[np.int64]
Placed = tuple[int, Payloads]  # what a push holds, and where that begins in flat order
FORMATS = {"none": DenseFormat.FLOAT32, "bf16": DenseFormat.BFLOAT16, "fp16": DenseFormat.FLOAT16}
NAMES = {format: name for name, format in FORMATS.items()}
SPARSE = "sparse"
ABSENT = "absent"  # of no push; nothing goes down
# Of kinds that as many came in, the first decides.
KINDS = (SPARSE, "1bit", "4bit", "8bit", "bf16", "fp16", "none")


@dataclass(frozen=True, slots=True)
class Way:
    """How consecutive elements go down.

    start, end: in flat order. first, last: they are of the tensors from `first` up to, but not including,
    `last`.
    compressor: of the differences, or of the values if it is lossless; None: nothing goes down.
    held: elements that a step may change (uint32, ascending, from `start`); None for all.
    """

    start: int
    end: int
    first: int
    last: int
    compressor: CompressorSpec | None
    held: Indices | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """The elements that pushes hold, of stretches that lie end to end.

    Attributes:
        indices: which elements, ascending, from the beginning of the first stretch.
        stops: where those of each stretch begin among them, and at last where they end.
        whole: whether some push holds all of a stretch.
        formats: by stretch, of the first push that holds elements of it with dense values.
    """

    indices: Indices
    stops: Sequence[int]
    whole: Sequence[bool]
    formats: Sequence[str]


def held_by(pushes: Sequence[Placed], borders: Int64) -> Held:
    """Find the elements that pushes hold from each border to the next; they hold nothing outside of these.
    One walk serves all stretches: pushes may have as many payloads as there are borders."""
    starts: list[int] = borders[:-1].tolist()
    stops: list[int] = borders[1:].tolist()
    whole, formats = [False] * len(starts), ["bf16" for _ in starts]
    known = [False] * len(starts)
    found: list[Indices] = []
    for at, payloads in pushes:
        for payload in payloads:
            first, at = at, at + payload.elements
            if isinstance(payload, AbsentPayload):
                continue
            places = range(bisect_right(stops, first), bisect_left(starts, at))
            if not isinstance(payload, SparsePayload):
                for place in places:
                    whole[place] = True
                continue
            found.append(decode_indices(payload) + np.uint32(first - starts[0]))
            if not isinstance(payload.values, DensePayload):
                continue
            for place in places:
                if not known[place]:
                    known[place], formats[place] = True, NAMES[payload.values.format]
    indices = _merged(found)
    offsets: Int64 = borders - borders[0]
    among: list[int] = np.searchsorted(indices, offsets).tolist()
    return Held(indices, among, whole, formats)


def _merged(held: Sequence[Indices]) -> Indices:
    if len(held) == 1:
        return held[0]
    merged: Indices = np.sort(np.concatenate([*held, np.empty(0, np.uint32)]), kind="stable")
    distinct: Indices = merged[np.diff(merged, prepend=merged[:1] - 1) != 0]
    return distinct


def most_bytes(format: str, elements: int, count: int | None) -> int:
    """Return an upper bound of the bytes that `count` of the elements take; None for all of them."""
    size = FORMATS[format].element_bytes
    return elements * size if count is None else count * size + max_index_bytes(elements, count)


def most(kinds: Sequence[str]) -> str:
    """Return the kind that most pushes have a tensor in."""
    counted = Counter(kind for kind in kinds if kind != ABSENT)
    return max(KINDS, key=counted.__getitem__) if counted else ABSENT


def kind_of(payload: Payload) -> str:
    match payload:
        case AbsentPayload():
            return ABSENT
        case DensePayload():
            return NAMES[payload.format]
        case LinearPayload():
            return "8bit" if payload.bits > 4 else "4bit"
        case QuantizedPayload():
            return {1: "1bit", 8: "8bit"}.get(payload.format.bits, "4bit")
        case SparsePayload():
            return SPARSE
