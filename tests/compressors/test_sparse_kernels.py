"""Codings of indices: exact sizes, round trips, and arbitrary bytes that are refused or canonical."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import plain_sparse
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.compressors import set_threads
from gradwire.compressors.kernels import sparse
from gradwire.compressors.kernels.shared import CHUNK, Indices

CASES = [(0, 0), (1, 0), (1, 1), (10, 3), (64, 64), (65, 1), (1000, 100), (1000, 1000), (50_000, 500)]


def drawn(elements: int, count: int, seed: int = 0) -> Indices:
    places = np.random.default_rng(seed).permutation(elements)[:count]
    return np.sort(places).astype(np.uint32)


@pytest.mark.parametrize("low_bits", [0, 1, 3, 6, 7, 8, 13, 31])
@pytest.mark.parametrize(("elements", "count"), CASES)
def test_gaps(elements: int, count: int, low_bits: int) -> None:
    indices = drawn(elements, count)
    data = sparse.encode_gaps(indices, elements, low_bits)
    assert np.array_equal(data, plain_sparse.encode_gaps(indices, elements, low_bits))
    assert data.size <= sparse.gaps_limit(elements, count, low_bits)
    assert np.array_equal(sparse.decode_gaps(data, elements, count, low_bits), indices)


@pytest.mark.parametrize("density", [0.1, 0.05, 0.02, 0.01, 0.005, 0.001])
def test_gaps_are_close_to_the_entropy(density: float) -> None:
    elements = 1_000_000
    indices = drawn(elements, int(density * elements))
    low_bits = sparse.gaps_low_bits(elements, indices.size)
    bits = 8 * sparse.encode_gaps(indices, elements, low_bits).size / indices.size
    entropy = -(density * np.log2(density) + (1 - density) * np.log2(1 - density)) / density
    assert bits <= 1.03 * entropy


@given(st.binary(max_size=16), st.integers(0, 120), st.integers(0, 31), st.data())
@settings(max_examples=500, deadline=None)
def test_arbitrary_bytes_are_refused_or_canonical(
    raw: bytes, elements: int, low_bits: int, draw: st.DataObject
) -> None:
    count = draw.draw(st.integers(0, elements))
    data = np.frombuffer(raw, np.uint8)

    def attempt(decode: Callable[..., Indices]) -> list[int] | None:
        try:
            indices: list[int] = decode(data, elements, count, low_bits).tolist()
        except ValueError:
            return None
        return indices

    found = attempt(sparse.decode_gaps)
    assert found == attempt(plain_sparse.decode_gaps)
    if found is not None:
        indices = np.array(found, np.uint32)
        assert np.array_equal(sparse.encode_gaps(indices, elements, low_bits), data)


@given(st.binary(max_size=8), st.integers(0, 64))
def test_a_bitmap_is_refused_or_canonical(raw: bytes, elements: int) -> None:
    data = np.frombuffer(raw, np.uint8)[: -(-elements // 8)]
    if data.size != -(-elements // 8):
        return
    count = int(np.unpackbits(data).sum())
    try:
        indices = sparse.decode_bitmap(data, elements, count)
    except ValueError:
        assert np.unpackbits(data, bitorder="little")[elements:].any()
        return
    assert np.array_equal(sparse.encode_bitmap(indices, elements), data)
    with pytest.raises(ValueError, match="another number"):
        sparse.decode_bitmap(data, elements, count + 1)


@pytest.mark.parametrize(("elements", "count"), [case for case in CASES if case[1]])
def test_drawn_indices(elements: int, count: int) -> None:
    for seed in (0, 1, 2**64 - 1):
        indices = sparse.seeded_indices(seed, elements, count)
        assert np.array_equal(indices, plain_sparse.seeded_indices(seed, elements, count))
        assert (np.diff(indices.astype(np.int64)) > 0).all()
        assert indices[-1] < elements


def test_drawn_indices_do_not_change_with_versions_of_anything() -> None:
    assert sparse.seeded_indices(12345, 1000, 5).tolist() == [144, 397, 405, 650, 963]


def test_every_element_is_drawn_alike() -> None:
    hits = np.zeros(100)
    for seed in range(2000):
        hits[sparse.seeded_indices(seed, 100, 10)] += 1
    assert abs(hits - 200).max() < 5 * np.sqrt(180)


@pytest.mark.parametrize(("elements", "count"), [*CASES, (64, 64), (64, 33), (65, 32), (128, 1), (1000, 999)])
def test_distinct_indices(elements: int, count: int) -> None:
    for seed in (0, 1, 2**64 - 1):
        indices = sparse.distinct_indices(seed, elements, count)
        assert indices.dtype == np.uint32
        assert indices.size == count
        if elements <= 100_000:
            assert np.array_equal(indices, plain_sparse.distinct_indices(seed, elements, count))
        assert (np.diff(indices.astype(np.int64)) > 0).all()
        assert not count or indices[-1] < elements


def test_distinct_indices_do_not_change_with_versions_of_anything() -> None:
    assert sparse.distinct_indices(12345, 1000, 5).tolist() == [363, 405, 450, 597, 944]


def test_any_set_of_elements_is_drawn_alike() -> None:
    hits = Counter(tuple(sparse.distinct_indices(seed, 5, 2).tolist()) for seed in range(10_000))
    assert len(hits) == 10
    assert all(abs(count - 1000) < 5 * np.sqrt(900) for count in hits.values())
    hits = Counter(tuple(sparse.distinct_indices(seed, 5, 3).tolist()) for seed in range(10_000))
    assert len(hits) == 10
    assert all(abs(count - 1000) < 5 * np.sqrt(900) for count in hits.values())


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("elements", [1, 17, 5000, CHUNK - 1, CHUNK + 1, 3 * CHUNK + 5])
def test_sums(elements: int, keep: bool) -> None:
    rng = np.random.default_rng(elements)
    indices = [drawn(elements, int(elements * part), w) for w, part in enumerate((0.0, 0.01, 0.3, 1.0, 0.02))]
    values = [rng.standard_normal(where.size).astype(np.float32) for where in indices]
    weights = rng.random(len(indices)).astype(np.float32)
    start = rng.standard_normal(elements).astype(np.float32)
    expected = start.copy()
    plain_sparse.add_sparse(indices, values, weights, expected, keep=keep)
    for threads in (1, 2):
        set_threads(threads)
        out = start.copy()
        sparse.add_sparse(indices, values, weights, out, keep=keep)
        assert np.array_equal(out.view(np.uint32), expected.view(np.uint32))


def test_what_does_not_fit_is_refused() -> None:
    out, one = np.zeros(4, np.float32), np.ones(1, np.float32)
    with pytest.raises(ValueError, match="expected ascending values below 4, got 4"):
        sparse.add_sparse([np.array([4], np.uint32)], [one], one, out)
    with pytest.raises(ValueError, match="expected ascending values below 4"):
        sparse.encode_gaps(np.array([1, 1], np.uint32), 4, 0)
    with pytest.raises(ValueError, match="fewer indices"):
        sparse.decode_gaps(np.zeros(0, np.uint8), 4, 2, 0)
