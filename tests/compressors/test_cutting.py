"""Payloads cut into parts decode and add up to the same bits, and joined again, too."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_payload_properties import CUT, payload_of, specs

from gradwire.compressors import (
    CodeFormat,
    DenseFormat,
    DensePayload,
    IndexCoding,
    LinearPayload,
    Payload,
    QuantizedPayload,
    Random,
    SparsePayload,
    StepContext,
    TensorSpec,
    create,
    cut,
    cut_at,
    decode,
    join,
    reduce_payloads,
    validate,
)
from gradwire.compressors.registry import BUILT_IN

Array = npt.NDArray[np.float32]


def compressed(spec: str, elements: int, seed: int) -> Payload:
    compressor = create(spec)
    values = np.random.default_rng(seed).standard_normal(elements).astype(np.float32)
    state = compressor.init(TensorSpec(name="w", shape=(elements,)))
    context = StepContext(
        samples=1, version=seed, epoch=math.inf, random=Random((seed,)), shared=Random((seed,))
    )
    return compressor.compress(torch.from_numpy(values), state, context)[0]


def decoded(payloads: list[Payload]) -> bytes:
    for payload in payloads:
        validate(payload)
    return b"".join(decode(payload).tobytes() for payload in payloads)


def check(payload: Payload, borders: list[int]) -> list[Payload]:
    """Cut everywhere, whatever is summed is what the whole sums to. Returns the parts."""
    values = decode(payload)
    parts: list[Payload] = []
    sums = [np.full(payload.elements, 0.3, np.float32) for _ in range(2)]
    reduce_payloads([payload], [1 / 3], sums[0], keep=True)
    for start, end in pairwise(borders):
        pieces = cut(payload, start, end)
        assert sum(piece.elements for piece in pieces) == end - start
        assert decoded(pieces) == values[start:end].tobytes()
        parts += pieces
    together = [decoded(pieces) for pieces in cut_at(payload, borders)]
    assert together == [values[start:end].tobytes() for start, end in pairwise(borders)]
    at = 0
    for part in parts:
        reduce_payloads([part], [1 / 3], sums[1][at : at + part.elements], keep=True)
        at += part.elements
    assert sums[0].tobytes() == sums[1].tobytes()
    return parts


def borders_of(elements: int, draw: st.DataObject, step: int) -> list[int]:
    places = draw.draw(st.lists(st.integers(0, elements // step).map(lambda n: n * step), max_size=4))
    return sorted({0, elements, *places})


@settings(max_examples=300)
@given(
    st.sampled_from(sorted({*BUILT_IN} - {"lowrank"})) | specs(),
    st.integers(0, 700),
    st.integers(0, 99),
    st.sampled_from([32, 32, 1]),
    st.data(),
)
def test_cuts_of_what_any_compressor_sends(
    spec: str, elements: int, seed: int, step: int, draw: st.DataObject
) -> None:
    check(compressed(spec, elements, seed), borders_of(elements, draw, step))


@pytest.mark.parametrize("kind", CUT)
@settings(max_examples=30)
@given(st.integers(0, 300), st.integers(0, 1 << 30), st.sampled_from([32, 1]), st.data())
def test_cuts_of_any_kind(kind: str, elements: int, seed: int, step: int, draw: st.DataObject) -> None:
    check(payload_of(kind, elements, seed), borders_of(elements, draw, step))


@given(
    st.sampled_from(["4bit", "2bit", "binary", "vote"]),
    st.lists(st.integers(0, 90), min_size=1, max_size=6),
    st.integers(0, 99),
    st.sampled_from([32, 1]),
    st.data(),
)
def test_cuts_across_blocks(kind: str, sizes: list[int], seed: int, step: int, draw: st.DataObject) -> None:
    alone = [payload_of(kind, size, seed + place) for place, size in enumerate(sizes)]
    joined = join(alone)
    assert len(joined) == 1
    assert decoded(joined) == decoded(alone)
    parts = check(joined[0], borders_of(sum(sizes), draw, step))
    assert decoded(join(parts)) == decoded(alone)


@given(st.lists(st.tuples(st.sampled_from(CUT), st.integers(0, 70)), max_size=8), st.integers(0, 99))
def test_joined_payloads_decode_to_the_same(members: list[tuple[str, int]], seed: int) -> None:
    payloads = [payload_of(kind, size, seed + place) for place, (kind, size) in enumerate(members)]
    joined = join(payloads)
    assert decoded(joined) == decoded(payloads)
    kinds = [getattr(payload, "format", None) for payload in joined]
    assert all(one is None or one is not other for one, other in pairwise(kinds))
    assert len(joined) <= len(payloads)


def dense(values: Array) -> DensePayload:
    return DensePayload(format=DenseFormat.FLOAT32, elements=values.size, data=values.view(np.uint8))


def test_no_memory_is_copied_where_parts_lie_in_a_row() -> None:
    values = np.random.default_rng(0).standard_normal(100).astype(np.float32)
    whole = dense(values)
    parts = [*cut(whole, 0, 32), *cut(whole, 32, 96), *cut(whole, 96, 100)]
    assert all(np.shares_memory(part.data, values) for part in parts)
    (joined,) = join(parts)
    assert np.shares_memory(joined.data, values)
    assert joined.data.tobytes() == whole.data.tobytes()
    (apart,) = join([parts[2], parts[0]])
    assert not np.shares_memory(apart.data, values)
    assert decode(apart).tobytes() == np.concatenate([values[96:], values[:32]]).tobytes()
    (other,) = join([dense(values[:50].copy()), dense(values[50:].copy())])
    assert decode(other).tobytes() == values.tobytes()


def test_codes_are_not_copied_where_words_begin() -> None:
    payload = join([payload_of("4bit", size, 0) for size in (100, 64, 333)])[0]
    (middle,) = cut(payload, 32, 164 + 320)
    assert isinstance(middle, QuantizedPayload)
    assert middle.block_sizes().tolist() == [68, 64, 320]
    assert np.shares_memory(middle.data, payload.data)
    (shifted,) = cut(payload, 33, 164 + 319)
    assert not np.shares_memory(shifted.data, payload.data)


def test_a_bucket_that_is_cut_keeps_its_scale() -> None:
    payload = replace(payload_of("linear5", 300, 0))
    assert isinstance(payload, LinearPayload)
    scales = np.arange(-(-300 // 96), dtype=np.float32)
    data = np.concatenate([scales.view(np.uint8), payload.codes()])
    payload = replace(payload, bucket=96, data=data)
    parts = cut(payload, 32, 300)
    assert [part.elements for part in parts] == [64, 204]
    check(payload, [0, 32, 64, 96, 160, 300])


def test_drawn_indices_become_explicit() -> None:
    payload = payload_of("seeded 4bit", 600, 3)
    for part in cut(payload, 64, 600):
        assert isinstance(part, SparsePayload)
        assert part.coding is not IndexCoding.SEEDED


def test_a_part_of_a_sparse_payload_may_hold_nothing() -> None:
    for kind in ("gaps 4bit", "bitmap linear8", "seeded bfloat16"):
        payload = payload_of(kind, 200, 1)
        assert isinstance(payload, SparsePayload)
        empty = replace(payload, elements=200)
        for part in cut(empty, 0, 1) + cut(empty, 199, 200):
            validate(part)


def test_a_whole_is_returned_as_it_is_and_nothing_as_nothing() -> None:
    payload = payload_of("seeded linear2", 100, 0)
    assert cut(payload, 0, 100) == [payload]
    assert cut(payload, 32, 32) == []
    assert cut(payload_of("4bit", 0, 0), 0, 0)[0].elements == 0


@pytest.mark.parametrize("part", [(-1, 3), (3, 2), (0, 101)])
def test_what_is_no_range_of_it_is_refused(part: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="expected a range in 100 elements"):
        cut(payload_of("float32", 100, 0), *part)


def test_votes_are_joined_as_votes() -> None:
    pushes = [[payload_of("vote", size, seed + size) for size in (9, 40)] for seed in range(3)]
    out, alone = np.empty(49, np.float32), np.empty(49, np.float32)
    whole = [join(parts)[0] for parts in pushes]
    assert all(isinstance(each, QuantizedPayload) and each.format is CodeFormat.VOTE for each in whole)
    reduce_payloads(whole, [0.2, 0.3, 0.5], out)
    for place, (start, end) in enumerate([(0, 9), (9, 49)]):
        reduce_payloads([parts[place] for parts in pushes], [0.2, 0.3, 0.5], alone[start:end])
    assert out.tobytes() == alone.tobytes()
