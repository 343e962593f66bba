"""What `auto` finds out from pushes: in which kind each tensor came, and which elements they hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...compressors import (
    AbsentPayload,
    DenseFormat,
    DensePayload,
    Indices,
    LinearPayload,
    Payload,
    QuantizedPayload,
    SparsePayload,
    decode_indices,
    sparse_bytes,
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
    compressor: of the differences; "none": values; ABSENT: nothing goes down. held: those that a step may
    change (uint32, ascending, from `start`); None for all.
    """

    start: int
    end: int
    first: int
    last: int
    compressor: str
    held: Indices | None = None


def held_by(pushes: Sequence[Placed], borders: Int64) -> tuple[Indices, npt.NDArray[np.bool_]]:
    """Of the elements from the first border to the last: which ones any push holds (ascending, counted from
    there), and, from each border to the next, whether some push holds all."""
    start, end = int(borders[0]), int(borders[-1])
    found: list[Indices] = []
    everything = np.zeros(borders.size - 1, np.bool_)
    for at, payloads in pushes:
        for payload in payloads:
            first, at = at, at + payload.elements
            if at <= start or first >= end or isinstance(payload, AbsentPayload):
                continue
            if not isinstance(payload, SparsePayload):
                everything |= (borders[:-1] < at) & (borders[1:] > first)
                continue
            indices = decode_indices(payload)
            if (first, at) != (start, end):
                moved = indices.astype(np.int64) + (first - start)
                indices = moved[(moved >= 0) & (moved < end - start)].astype(np.uint32)
            found.append(indices)
    return _merged(found), everything


def _merged(held: Sequence[Indices]) -> Indices:
    if len(held) == 1:
        return held[0]
    merged: Indices = np.sort(np.concatenate([*held, np.empty(0, np.uint32)]), kind="stable")
    distinct: Indices = merged[np.diff(merged, prepend=merged[:1] - 1) != 0]
    return distinct


def most_bytes(format: str, elements: int, count: int | None) -> int:
    """That so many of the elements take, or all of them."""
    size = FORMATS[format].element_bytes
    return elements * size if count is None else count * size + sparse_bytes(elements, count)


def most(kinds: Sequence[str]) -> str:
    """Which kind most pushes have a tensor in."""
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
            return "1bit" if payload.format.bits == 1 else "4bit"
        case SparsePayload():
            return SPARSE


def value_format(pushes: Sequence[Placed]) -> str:
    """Of the first sparse push whose values are dense."""
    for _, payloads in pushes:
        for payload in payloads:
            if isinstance(payload, SparsePayload) and isinstance(payload.values, DensePayload):
                return NAMES[payload.values.format]
    return "bf16"
