"""The plan: how a model is divided into parts, and these into slices."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.common.parts import ALIGNMENT, LEAST_BYTES, SHARE, Part, Plan, Unit, divide

SIZES = st.integers(0, 3) | st.integers(0, 40_000) | st.sampled_from([ALIGNMENT, 3 * ALIGNMENT + 1])
MODELS = st.lists(SIZES, min_size=1, max_size=12)
BYTES = st.sampled_from([0, 1, 4 * ALIGNMENT, 20_000, 1 << 16, 1 << 30])
SLICES = st.integers(1, 5)


@given(MODELS, BYTES, SLICES)
def test_every_element_is_in_exactly_one_part(elements: list[int], part_bytes: int, slices: int) -> None:
    plan = divide(elements, part_bytes, slices)
    assert plan.elements == sum(elements)
    bounds = sorted((part.start, part.end) for part in plan.parts)
    assert (bounds[0][0], bounds[-1][1]) == (0, plan.elements)
    assert all(one[1] == other[0] for one, other in pairwise(bounds))
    assert all(part.elements for part in plan.parts) or len(plan.parts) == 1 or 0 in elements


@given(MODELS, BYTES, SLICES)
def test_parts_come_in_the_order_in_which_backward_produces_gradients(
    elements: list[int], part_bytes: int, slices: int
) -> None:
    """The last tensors first; within a tensor, from its beginning."""
    plan = divide(elements, part_bytes, slices)
    last, number = len(elements), 0
    for unit in plan.units:
        assert unit.last == last
        assert (unit.start, unit.end) == (plan.starts[unit.first], plan.starts[unit.last])
        assert unit.parts == range(number, number + len(unit.parts))
        parts = [plan.parts[part] for part in unit.parts]
        assert (parts[0].start, parts[-1].end) == (unit.start, unit.end)
        assert all(one.end == other.start for one, other in pairwise(parts))
        assert len(parts) == 1 or unit.last - unit.first == 1  # only a tensor by itself is cut
        last, number = unit.first, number + len(parts)
    assert (last, number) == (0, len(plan.parts))
    for place, unit in enumerate(plan.units[number] for number in plan.unit_of()):
        assert unit.first <= place < unit.last


@given(MODELS, BYTES, SLICES)
def test_cuts_are_at_multiples_of_the_alignment(elements: list[int], part_bytes: int, slices: int) -> None:
    plan = divide(elements, part_bytes, slices)
    for unit in plan.units:
        cuts = [plan.parts[part].end - unit.start for part in unit.parts][:-1]
        assert all(cut % ALIGNMENT == 0 for cut in cuts)


@given(MODELS, BYTES, SLICES)
def test_no_part_is_larger_than_was_asked_for(elements: list[int], part_bytes: int, slices: int) -> None:
    """But for the alignment, which is the least there is."""
    plan = divide(elements, part_bytes, slices)
    most = part_bytes or max(LEAST_BYTES, 4 * plan.elements // SHARE)
    assert all(4 * part.elements <= max(most, 4 * ALIGNMENT) for part in plan.parts)


@given(MODELS, BYTES, SLICES)
def test_every_element_has_one_part(elements: list[int], part_bytes: int, slices: int) -> None:
    plan = divide(elements, part_bytes, slices)
    assert [unit.first for unit in plan.units] == [*(unit.last for unit in plan.units[1:]), 0]
    bounds = sorted((part.start, part.end) for part in plan.parts)
    assert (bounds[0][0], bounds[-1][1]) == (0, sum(elements))
    assert all(one[1] == other[0] for one, other in pairwise(bounds))


@given(MODELS, BYTES, SLICES)
def test_slices_partition_the_parts(elements: list[int], part_bytes: int, count: int) -> None:
    plan = divide(elements, part_bytes, count)
    slices = [plan.slice(number, count) for number in range(count)]
    assert sorted(part for each in slices for part in each) == [*range(len(plan.parts))]


@given(MODELS, BYTES, SLICES)
def test_slices_are_equally_large_but_for_a_part(elements: list[int], part_bytes: int, count: int) -> None:
    plan = divide(elements, part_bytes, count)
    largest = max(part.elements for part in plan.parts)
    for number in range(count):
        size = sum(plan.parts[part].elements for part in plan.slice(number, count))
        assert abs(size - plan.elements / count) <= largest


def test_small_tensors_share_a_part_and_a_large_one_is_cut() -> None:
    assert divide([10, 20, 3 * ALIGNMENT, 30], 8 * ALIGNMENT) == Plan(
        parts=(
            Part(30 + 3 * ALIGNMENT, 60 + 3 * ALIGNMENT),
            Part(30, 30 + 2 * ALIGNMENT),
            Part(30 + 2 * ALIGNMENT, 30 + 3 * ALIGNMENT),
            Part(0, 30),
        ),
        units=(
            Unit(3, 4, range(1), 30 + 3 * ALIGNMENT, 60 + 3 * ALIGNMENT),
            Unit(2, 3, range(1, 3), 30, 30 + 3 * ALIGNMENT),
            Unit(0, 2, range(3, 4), 0, 30),
        ),
        starts=(0, 10, 30, 30 + 3 * ALIGNMENT, 60 + 3 * ALIGNMENT),
    )


def test_a_tensor_that_may_not_be_cut_is_in_one_part() -> None:
    elements = [4 * ALIGNMENT, 4 * ALIGNMENT, 10]
    plan = divide(elements, 4 * 2 * ALIGNMENT, uncut=[1])
    assert [part.elements for part in plan.parts] == [10, 4 * ALIGNMENT, 2 * ALIGNMENT, 2 * ALIGNMENT]


@pytest.mark.parametrize("elements", [[0], [1], [0, 0], [0, 1, 0]])
def test_the_smallest_models_have_one_part(elements: list[int]) -> None:
    plan = divide(elements, slices=4)
    assert plan.parts == (Part(0, sum(elements)),)
    assert plan.units == (Unit(0, len(elements), range(1), 0, sum(elements)),)


def test_the_default_is_a_share_of_the_model_and_not_less_than_a_few_megabytes() -> None:
    large = divide([1 << 20] * 64)
    assert {4 * part.elements for part in large.parts} == {64 * (4 << 20) // SHARE}
    small = divide([1 << 20])
    assert {4 * part.elements for part in small.parts} == {LEAST_BYTES}
