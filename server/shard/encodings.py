"""Derives the encodings of an update from pushes, for `--downlink auto`: the kind that each tensor was pushed
in, and the elements that the pushes hold."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ...compressors import (
    AbsentPayload,
    Compressor,
    CompressorSpec,
    DenseFormat,
    DensePayload,
    Indices,
    LinearPayload,
    Payload,
    ProjectedPayload,
    QuantizedPayload,
    SparsePayload,
    decode_indices,
    max_index_bytes,
)
from .mean import Payloads

Int64 = npt.NDArray[np.int64]
Placed = tuple[int, Payloads]  # first element in flat order, and the payloads of a push from there on
FORMATS = {"none": DenseFormat.FLOAT32, "bf16": DenseFormat.BFLOAT16, "fp16": DenseFormat.FLOAT16}
NAMES = {format: name for name, format in FORMATS.items()}
SPARSE = "sparse"
BLOCK_SIGNS = "1bit:block=4096"
ABSENT = "absent"  # no push has a gradient: nothing is sent
# Among equally frequent kinds, the first one in this list is chosen.
KINDS = (SPARSE, "1bit", BLOCK_SIGNS, "4bit", "8bit", "bf16", "fp16", "none")


@dataclass(frozen=True, slots=True)
class DownlinkEncoding:
    """The encoding of a range of elements in an update.

    Attributes:
        start: first element of the range, in flat order.
        end: element after the last one, in flat order.
        first: index of the first tensor that the elements belong to.
        last: index after the last such tensor.
        compressor: encodes the parameters' values if it is lossless, else their differences to the replica;
            None: nothing is sent.
        held: elements that a step may change (uint32, ascending, counted from `start`); None for all of them.
        stepped: True for one tensor of which the mean gradient is sent, because replicas take the step.
    """

    start: int
    end: int
    first: int
    last: int
    compressor: CompressorSpec | None
    held: Indices | None = None
    stepped: bool = False


@dataclass(slots=True)
class Coder:
    """One compressor of the downlink, built for each tensor of the model.

    Attributes:
        chosen: for each tensor, the declaration.
        compressors: for each tensor, the compressor; equal declarations share it.
        states: for each tensor, the compressor's state.
    """

    chosen: list[CompressorSpec]
    compressors: list[Compressor]
    states: list[Any] = field(default_factory=list[Any])


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """The elements that pushes hold in consecutive ranges.

    Attributes:
        indices: the elements, ascending, counted from the beginning of the first range.
        stops: position in `indices` at which each range begins, and at the end their number.
        whole: for each range, whether some push holds all of it.
        formats: for each range, the dense format of the first push that holds elements of it with dense
            values.
    """

    indices: Indices
    stops: Sequence[int]
    whole: Sequence[bool]
    formats: Sequence[str]


def held_by(pushes: Sequence[Placed], borders: Int64) -> Held:
    """Return the elements that pushes hold in each range between two borders. All pushes are walked once for
    all ranges, because a push may have as many payloads as there are borders.

    Args:
        pushes: position and payloads of each push, which lie within the borders.
        borders: begin of each range in flat order, ascending, and the end of the last one.
    """
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
            touched = range(bisect_right(stops, first), bisect_left(starts, at))
            if not isinstance(payload, SparsePayload):
                for index in touched:
                    whole[index] = True
                continue
            found.append(decode_indices(payload) + np.uint32(first - starts[0]))
            if not isinstance(payload.values, DensePayload):
                continue
            for index in touched:
                if not known[index]:
                    known[index], formats[index] = True, NAMES[payload.values.format]
    indices = _merged(found)
    offsets: Int64 = borders - borders[0]
    among: list[int] = np.searchsorted(indices, offsets).tolist()
    return Held(indices, among, whole, formats)


def held_elements(encodings: Sequence[DownlinkEncoding]) -> Int64 | None:
    """Return the elements that a step of sparse pushes can change, in flat order, ascending; None if it may
    change all of them."""
    encodings = [each for each in encodings if each.compressor is not None]
    held = [each.held.astype(np.int64) + each.start for each in encodings if each.held is not None]
    return np.concatenate(held) if held and len(held) == len(encodings) else None


def _merged(held: Sequence[Indices]) -> Indices:
    """Return the distinct elements of several lists, ascending."""
    if len(held) == 1:
        return held[0]
    merged: Indices = np.sort(np.concatenate([*held, np.empty(0, np.uint32)]), kind="stable")
    distinct: Indices = merged[np.diff(merged, prepend=merged[:1] - 1) != 0]
    return distinct


def most_bytes(format: str, elements: int, count: int | None) -> int:
    """Return an upper bound of the encoded bytes of `count` among `elements` elements in a dense format.
    count: None for all elements."""
    size = FORMATS[format].element_bytes
    return elements * size if count is None else count * size + max_index_bytes(elements, count)


def most(kinds: Sequence[str]) -> str:
    """Return the kind in which most pushes hold a tensor; among equally frequent kinds, the first in `KINDS`.
    Absent gradients do not count."""
    counted = Counter(kind for kind in kinds if kind != ABSENT)
    return max(KINDS, key=counted.__getitem__) if counted else ABSENT


def kind_of(payload: Payload) -> str:
    """Return the name of a payload's kind: one of `KINDS`, or `ABSENT`."""
    match payload:
        case AbsentPayload():
            return ABSENT
        case DensePayload():
            return NAMES[payload.format]
        case LinearPayload():
            return BLOCK_SIGNS if payload.bits == 1 else "8bit" if payload.bits > 4 else "4bit"
        case QuantizedPayload():
            return {1: "1bit", 8: "8bit"}.get(payload.format.bits, "4bit")
        case ProjectedPayload():
            return "4bit"  # of the change, which has no coordinates unless replicas step it
        case SparsePayload():
            return SPARSE
