"""Exact selection: the elements that a stable sort gives, whatever layout and threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import plain_selection
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from gradwire.compressors import set_threads
from gradwire.compressors.kernels import selection
from gradwire.compressors.kernels.selection import RUN, SMALL, STRIDE
from gradwire.compressors.kernels.shared import CHUNK, Score, Selection

Array = npt.NDArray[np.float32]

SIZES = [1, 2, 15, 16, 17, 1000, SMALL, SMALL + 1, 40_003]
LARGE = [CHUNK - 1, CHUNK + 1, 2 * CHUNK + 77]


def layouts(elements: int) -> dict[str, Array]:
    rng = np.random.default_rng(elements)
    scales = rng.choice(np.array([1e-44, 1e-3, 1.0, 1e30]), elements)
    mixed: Array = (rng.standard_normal(elements) * scales).astype(np.float32)
    extreme = mixed.copy()
    special = np.array([3.4e38, -3.4e38, -0.0, 0.0, 1e-45], np.float32)
    places = rng.integers(0, elements, min(elements, 9))
    extreme[places] = rng.choice(special, places.size)
    bunched: Array = rng.standard_normal(elements).astype(np.float32) * np.float32(1e-3)
    bunched[: elements // 50] += np.float32(5.0)
    return {
        "mixed": mixed,
        "extreme": extreme,
        "constant": np.full(elements, 0.25, np.float32),
        "zero": np.zeros(elements, np.float32),
        "nearly all zero": np.where(rng.random(elements) < 0.004, mixed, np.float32(-0.0)),
        "ascending": np.sort(mixed),
        "descending": np.sort(mixed)[::-1].copy(),
        "all large ones at the beginning": bunched,
        "few distinct values": np.round(rng.standard_normal(elements)).astype(np.float32),
    }


def same(one: Selection, other: Selection) -> bool:
    return np.array_equal(one.indices, other.indices) and np.array_equal(
        one.values.view(np.uint32), other.values.view(np.uint32)
    )


def amounts(elements: int) -> set[int]:
    return {0, 1, elements // 100, elements // 2, elements}


@pytest.mark.parametrize("score", Score)
@pytest.mark.parametrize("elements", SIZES)
def test_select_is_exact(elements: int, score: Score) -> None:
    for name, values in layouts(elements).items():
        for keep in amounts(elements):
            for center in (0.0, 1.0, -3e38) if score is Score.MAGNITUDE else (0.0,):
                expected = plain_selection.select(values, keep, score=score, center=center)
                got = selection.select(values, keep, score=score, center=center)
                assert same(got, expected), (name, keep, center)


@pytest.mark.parametrize("elements", LARGE)
def test_select_is_exact_across_chunks_and_threads(elements: int) -> None:
    for name, values in layouts(elements).items():
        for keep in amounts(elements):
            expected = plain_selection.select(values, keep)
            for threads in (1, 2):
                set_threads(threads)
                assert same(selection.select(values, keep), expected), (name, keep, threads)


@pytest.mark.parametrize("elements", [*SIZES, CHUNK + 1])
def test_add_and_select_leaves_the_saturating_sum(elements: int) -> None:
    gradient = layouts(elements)["extreme"][::-1].copy()
    for name, values in layouts(elements).items():
        for keep in amounts(elements):
            expected_sum = values.copy()
            expected = plain_selection.add_and_select(gradient, expected_sum, keep)
            residual, added = values.copy(), values.copy()
            got = selection.add_and_select(gradient, residual, keep)
            assert same(got, expected), (name, keep)
            assert np.array_equal(residual.view(np.uint32), expected_sum.view(np.uint32)), name
            selection.add_to(added, gradient)
            assert np.array_equal(added.view(np.uint32), expected_sum.view(np.uint32)), name
            before, left = values.copy(), aligned(elements)
            assert same(selection.add_and_select(gradient, before, keep, left), expected), (name, keep)
            assert np.array_equal(left.view(np.uint32), expected_sum.view(np.uint32)), name
            assert np.array_equal(before.view(np.uint32), values.view(np.uint32)), name


def aligned(elements: int) -> npt.NDArray[np.float32]:
    """Memory that begins with a cache line, and holds NaN."""
    room = np.full(elements + 16, np.nan, np.float32)
    first = -room.ctypes.data % 64 // 4
    return room[first : first + elements]


def test_a_large_sum_is_written_past_the_cache_to_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    gradient, before = layouts(2 * CHUNK + 77)["mixed"], layouts(2 * CHUNK + 77)["extreme"]
    expected_sum = before.copy()
    expected = plain_selection.add_and_select(gradient, expected_sum, 700)
    monkeypatch.setattr(selection, "STREAM_ELEMENTS", 1)
    for left in (aligned(gradient.size), aligned(gradient.size + 1)[1:]):  # the latter cannot be
        assert same(selection.add_and_select(gradient, before, 700, left), expected)
        assert np.array_equal(left.view(np.uint32), expected_sum.view(np.uint32))


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 5, CHUNK, CHUNK + 32, -1])
@pytest.mark.parametrize("elements", [1, 17, CHUNK + 33])
def test_a_gradient_that_is_not_finite_is_found_in_the_same_pass(
    wrong: float, place: int, elements: int
) -> None:
    gradient, zeros = np.ones(elements, np.float32), np.zeros(elements, np.float32)
    gradient[min(place, elements - 1)] = wrong
    with pytest.raises(FloatingPointError, match="finite"):
        selection.add_and_select(gradient, zeros, 1, np.empty_like(zeros))
    assert not zeros.any()


@pytest.mark.parametrize("elements", [*SIZES, *LARGE])
def test_median_is_the_lower_one_in_the_middle(elements: int) -> None:
    for name, values in layouts(elements).items():
        assert selection.median(values) == plain_selection.median(values), name


@pytest.mark.parametrize("elements", [*SIZES, CHUNK + 1])
def test_at_least_includes_the_threshold(elements: int) -> None:
    for values in layouts(elements).values():
        for threshold in (0.0, 0.25, 1.0, 1e30):
            expected = plain_selection.at_least(values, threshold)
            assert same(selection.at_least(values, threshold), expected)


floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(arrays.arrays(np.float32, st.integers(1, 200), elements=floats), st.data())
@settings(max_examples=200, deadline=None)
def test_any_values(values: Array, data: st.DataObject) -> None:
    keep = data.draw(st.integers(0, values.size))
    center = float(values[data.draw(st.integers(0, values.size - 1))])
    for score in Score:
        expected = plain_selection.select(values, keep, score=score, center=center)
        assert same(selection.select(values, keep, score=score, center=center), expected)


def test_many_callers_at_once() -> None:
    values = layouts(2 * CHUNK + 77)["mixed"]
    expected = plain_selection.select(values, 5000)

    def attempt(_: int) -> Selection:
        return selection.select(values, 5000)

    with ThreadPoolExecutor(4) as pool:
        for got in pool.map(attempt, range(15)):
            assert same(got, expected)


@pytest.mark.parametrize("sampled", ["nothing", "everything"])
@pytest.mark.parametrize("keep", [1, 700, CHUNK])
def test_a_sample_that_tells_nothing_costs_time_only(sampled: str, keep: int) -> None:
    values = layouts(2 * CHUNK + 77)["mixed"]
    seen = np.zeros(values.size, bool)
    seen[: values.size // STRIDE * STRIDE].reshape(-1, STRIDE)[:, :RUN] = True
    values[seen if sampled == "everything" else ~seen] = 0.0
    assert same(selection.select(values, keep), plain_selection.select(values, keep))
    expected = plain_selection.add_and_select(values, np.zeros_like(values), keep)
    assert same(selection.add_and_select(values, np.zeros_like(values), keep), expected)


def test_put() -> None:
    out, indices = np.zeros(3 * CHUNK, np.float32), np.arange(1, 3 * CHUNK, 2, dtype=np.uint32)
    selection.put(out, indices, np.ones(indices.size, np.float32))
    assert out.reshape(-1, 2).tolist() == [[0.0, 1.0]] * (out.size // 2)
    with pytest.raises(ValueError, match="indices: expected ascending values below 5, got 5"):
        selection.put(np.zeros(5, np.float32), np.array([5], np.uint32), np.ones(1, np.float32))


def test_what_cannot_be_selected_is_refused() -> None:
    values = np.zeros(5, np.float32)
    with pytest.raises(ValueError, match="keep: expected 0 to 5, got 6"):
        selection.select(values, 6)
    with pytest.raises(ValueError, match="values: expected at least one element"):
        selection.median(values[:0])
    with pytest.raises(ValueError, match="expected contiguous float32"):
        selection.select(np.zeros(10, np.float32)[::2], 1)
