"""Cutting and joining payloads without decoding them. The elements decode to the same bits before and after.

`cut` takes a range of the elements out of a payload, `cut_at` several ranges, and `join` makes one payload of
neighbours where it can. The results share memory with the given payloads where the data lie in one piece
there; otherwise data are copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from .indices import decode_indices, sparse_payload
from .kernels.checks import address, addresses
from .payload import (
    NO_BYTES,
    AbsentPayload,
    Bytes,
    CodeFormat,
    DenseFormat,
    DensePayload,
    Int64,
    LinearPayload,
    Payload,
    ProjectedPayload,
    QuantizedPayload,
    SparsePayload,
    ValuePayload,
    code_bytes,
    code_words,
)


def cut(payload: Payload, start: int, end: int) -> list[Payload]:
    """Return payloads that decode, one after another, to the elements from `start` up to `end` of a valid
    payload.

    There is none for an empty range, and more than one only where the range begins inside a bucket of linear
    codes: the first then holds the rest of the bucket. Codes are shared if a word begins at `start`, as it
    does at every multiple of 32 from the beginning of a block; otherwise they are copied and shifted.

    Raises:
        ValueError: the range does not lie in the payload, or is a piece of a projected one.
    """
    if not 0 <= start <= end <= payload.elements:
        raise ValueError(f"expected a range in {payload.elements} elements, got {start} to {end}")
    return cut_at(payload, [start, end])[0]


def cut_at(payload: Payload, borders: Sequence[int]) -> list[list[Payload]]:
    """Return the payloads of each range between neighbouring borders, at about the cost of one `cut`.

    borders: at least two indices of elements, ascending, within the payload.
    """
    ranges = [*pairwise(borders)]
    if ranges == [(0, payload.elements)]:
        return [[payload]]
    if isinstance(payload, ProjectedPayload):
        raise ValueError("coordinates in bases cannot be cut: send the tensor in one part")
    if isinstance(payload, SparsePayload):
        return _cut_sparse(payload, borders)
    if isinstance(payload, AbsentPayload):
        return [[AbsentPayload(elements=end - start)] if start < end else [] for start, end in ranges]
    return [[*parts] for parts in _cut_values(payload, borders)]


def join(payloads: Iterable[Payload]) -> list[Payload]:
    """Return payloads of the same elements in the same order, with neighbours joined to one payload where
    possible.

    Neighbours can be joined if both are

    - dense, of equal format
    - quantized, of equal format; they become blocks, each with its own levels
    - absent
    - linear with equal bits and bucket size, and the last bucket of the first payload is full
    """
    runs: list[list[Payload]] = []
    for payload in payloads:
        if runs and _alike(runs[-1][-1], payload):
            runs[-1].append(payload)
        else:
            runs.append([payload])
    return [_joined(run) for run in runs]


def _cut_values(payload: ValuePayload, borders: Sequence[int]) -> list[list[ValuePayload]]:
    ranges = [*pairwise(borders)]
    match payload:
        case DensePayload():
            size = payload.format.element_bytes
            return [
                [replace(payload, elements=end - start, data=payload.data[start * size : end * size])]
                if start < end
                else []
                for start, end in ranges
            ]
        case QuantizedPayload():
            sizes = payload.block_sizes()
            blocks = sizes, np.cumsum(sizes), np.cumsum(code_words(payload.format.bits, sizes))
            return [
                [_cut_quantized(payload, *blocks, start, end)] if start < end else [] for start, end in ranges
            ]
        case LinearPayload():
            return [_cut_buckets(payload, start, end) for start, end in ranges]


def _cut_buckets(payload: LinearPayload, start: int, end: int) -> list[ValuePayload]:
    """Return the rest of a bucket, then whole buckets."""
    border = min(end, -(-start // payload.bucket) * payload.bucket)
    parts = [(start, border), (border, end)]
    return [_cut_linear(payload, first, last) for first, last in parts if first < last]


def _cut_quantized(
    payload: QuantizedPayload, sizes: Int64, stops: Int64, words: Int64, start: int, end: int
) -> QuantizedPayload:
    """Return a range of a quantized payload, which may begin and end within blocks.

    Args:
        sizes: number of elements of each block.
        stops: index after the last element of each block.
        words: index after the last 32-bit word of codes of each block.
    """
    bits = payload.format.bits
    # Numbers of the blocks that hold the first element and the last one.
    first, last = (int(block) for block in np.searchsorted(stops, [start, end - 1], "right"))
    before, beyond = start - int(stops[first] - sizes[first]), int(stops[last]) - end
    kept = sizes[first : last + 1].copy()
    kept[0] -= before
    kept[-1] -= beyond
    begin = 4 * int(words[first] - code_words(bits, sizes[first : first + 1])[0])
    data = _codes(payload.data[begin:], bits, before, int(kept[0]), int(sizes[first]))
    if last > first:
        # The blocks between the first and the last are whole.
        begin, final = 4 * int(words[first]), 4 * int(words[last - 1])
        tail = _codes(payload.data[final:], bits, 0, int(kept[-1]), int(sizes[last]))
        data = _concatenated([data, payload.data[begin:final], tail])
    count = payload.format.level_count
    return QuantizedPayload(
        format=payload.format,
        elements=end - start,
        levels=payload.levels[count * first : count * (last + 1)],
        sizes=kept if payload.sizes is not None else None,
        data=data,
    )


def _cut_linear(payload: LinearPayload, start: int, end: int) -> LinearPayload:
    """Return a range of a linear payload that begins with a bucket, or ends before the next bucket begins."""
    first, last = start // payload.bucket, -(-end // payload.bucket)
    codes = _codes(payload.codes(), payload.bits, start, end - start, payload.elements)
    data = np.concatenate([payload.data[4 * first : 4 * last], codes])
    return replace(payload, elements=end - start, data=data)


def _cut_sparse(payload: SparsePayload, borders: Sequence[int]) -> list[list[Payload]]:
    indices, values = decode_indices(payload), payload.value_payload()
    positions: list[int] = np.searchsorted(indices, borders).tolist()
    found: list[list[Payload]] = []
    for (start, end), first, parts in zip(
        pairwise(borders), positions[:-1], _cut_values(values, positions), strict=True
    ):
        if not parts and start < end:
            parts = [_nothing(values)]
        cuts: list[Payload] = []
        for index, part in enumerate(parts):
            stop = first + part.elements
            # If values were cut to several payloads, each begins at the index of its first value.
            border = end if index == len(parts) - 1 else int(indices[stop])
            piece = sparse_payload(border - start, indices[first:stop] - np.uint32(start), part)
            cuts.append(replace(piece, seed=payload.seed))  # drawn indices still say so
            first, start = stop, border
        found.append(cuts)
    return found


def _nothing(values: ValuePayload) -> ValuePayload:
    if isinstance(values, QuantizedPayload):
        one = values.levels[: values.format.level_count]
        return replace(values, elements=0, sizes=None, levels=one, data=NO_BYTES)
    return replace(values, elements=0, data=NO_BYTES)


def _codes(data: Bytes, bits: int, start: int, count: int, elements: int) -> Bytes:
    """Return `count` codes from `start` on, of the `elements` codes in `data`, padded with zeros to a whole
    word."""
    size, first = code_bytes(bits, count), start * bits
    begin = first // 8
    if first % 32 == 0 and (start + count == elements or count * bits % 32 == 0):
        return data[begin : begin + size]
    taken = np.unpackbits(data[begin : -(-(first + count * bits) // 8)], bitorder="little")[first % 8 :]
    codes = np.zeros(size, np.uint8)
    packed = np.packbits(taken[: count * bits], bitorder="little")
    codes[: packed.size] = packed
    return codes


def _alike(one: Payload, other: Payload) -> bool:
    if isinstance(one, LinearPayload) and isinstance(other, LinearPayload):
        # The last bucket of `one` has to be full: `other` then begins with a bucket and with a word of codes.
        return (one.bits, one.bucket) == (other.bits, other.bucket) and one.elements % one.bucket == 0
    return _format(one) is not None and _format(one) is _format(other)


def _format(payload: Payload) -> DenseFormat | CodeFormat | type[AbsentPayload] | None:
    """Return the format with which a payload can be joined; None for other kinds."""
    if isinstance(payload, AbsentPayload):
        return AbsentPayload
    return payload.format if isinstance(payload, DensePayload | QuantizedPayload) else None


def _joined(run: list[Payload]) -> Payload:
    first = run[0]
    if len(run) == 1:
        return first
    elements = sum(each.elements for each in run)
    if isinstance(first, AbsentPayload):
        return AbsentPayload(elements=elements)
    if isinstance(first, LinearPayload):
        linear = [each for each in run if isinstance(each, LinearPayload)]
        parts = [each.scales().view(np.uint8) for each in linear] + [each.codes() for each in linear]
        return replace(first, elements=elements, data=np.concatenate(parts))
    data = _concatenated([each.data for each in run])
    if isinstance(first, DensePayload):
        return replace(first, elements=elements, data=data)
    blocks = [each for each in run if isinstance(each, QuantizedPayload)]
    return QuantizedPayload(
        format=blocks[0].format,
        elements=elements,
        levels=np.concatenate([each.levels for each in blocks]),
        sizes=np.concatenate([each.block_sizes() for each in blocks]),
        data=data,
    )


def _concatenated(parts: list[Bytes]) -> Bytes:
    """Return the parts one after another: a view if they are neighbours in one buffer, otherwise a copy."""
    parts = [part for part in parts if part.size]
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return NO_BYTES
    base = parts[0].base
    positions = addresses(parts)
    sizes = np.array([part.size for part in parts], np.int64)
    in_a_row = bool((np.diff(positions) == sizes[:-1]).all())
    if not (in_a_row and isinstance(base, np.ndarray) and base.flags.c_contiguous):
        return np.concatenate(parts)
    if any(part.base is not base for part in parts):  # neighbours in memory, but of different buffers
        return np.concatenate(parts)
    offset = int(positions[0]) - int(address(base))
    return base.reshape(-1).view(np.uint8)[offset : offset + int(sizes.sum())]
