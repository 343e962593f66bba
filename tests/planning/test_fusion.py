"""Fusion against its formulas, by hand and at random."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.planning import (
    Group,
    Layer,
    Link,
    by_bytes,
    fastest,
    layer_by_layer,
    mg_wfbp,
    produced,
    seamgs,
    sent,
    sparse_error,
)
from gradwire.planning.fusion import keeps_accuracy

SECONDS = st.floats(0, 1)


@st.composite
def layers(draw: st.DrawFn, most: int = 12) -> list[Layer]:
    found: list[Layer] = []
    for _ in range(draw(st.integers(1, most))):
        elements = draw(st.integers(1, 10_000))
        kept = draw(st.integers(1, elements))
        found.append(
            Layer(
                elements=elements,
                kept=kept,
                sent_bytes=2.0 * kept,
                backward_s=draw(SECONDS),
                square_norm=draw(st.floats(0, 1e6)),
            )
        )
    return found


links = st.builds(Link, start_s=SECONDS, byte_s=st.floats(0, 1e-3))


def divisions(count: int) -> Iterator[list[Group]]:
    """All of them, in the order of backward."""
    for cuts in product((False, True), repeat=count - 1):
        borders = [0, *(place + 1 for place, cut in enumerate(cuts) if cut), count]
        yield [Group(first, last) for first, last in pairwise(borders)][::-1]


def end(model: Sequence[Layer], link: Link, groups: Sequence[Group]) -> float:
    return sent(model, link, groups)[-1].end_s


def layer(*, backward_s: float = 0.0, kept: int = 1, elements: int = 1, square_norm: float = 0.0) -> Layer:
    return Layer(
        elements=elements, kept=kept, sent_bytes=kept, backward_s=backward_s, square_norm=square_norm
    )


def test_backward_produces_the_last_layer_first() -> None:
    assert produced([layer(backward_s=3.0), layer(backward_s=2.0), layer(backward_s=1.0)]) == [6.0, 3.0, 1.0]


def test_a_message_waits_for_its_gradients_and_for_the_one_before() -> None:
    model = [layer(backward_s=5.0, kept=1), layer(backward_s=1.0, kept=3), layer(backward_s=1.0, kept=2)]
    found = sent(model, Link(start_s=1.0, byte_s=1.0), layer_by_layer(model))
    assert [(each.start_s, each.end_s) for each in found] == [(1.0, 4.0), (4.0, 8.0), (8.0, 10.0)]


def test_messages_of_a_fixed_size_are_closed_once_they_have_it() -> None:
    model = [layer(kept=each) for each in (5, 1, 2, 4, 1)]
    assert by_bytes(model, 5) == [Group(3, 5), Group(0, 3)]
    assert by_bytes(model, 1e9) == [Group(0, 5)]
    assert by_bytes(model, 0) == layer_by_layer(model)


def test_layers_whose_gradients_come_long_after_each_other_are_not_merged() -> None:
    model = [layer(backward_s=10.0) for _ in range(4)]
    assert mg_wfbp(model, Link(start_s=1.0, byte_s=1.0)) == layer_by_layer(model)


def test_layers_whose_gradients_come_at_once_are_merged() -> None:
    model = [layer() for _ in range(4)]
    assert mg_wfbp(model, Link(start_s=1.0, byte_s=1.0)) == [Group(0, 4)]


def test_a_merge_that_raises_the_error_is_not_made_for_accuracy() -> None:
    """The layer that weighs more has the higher density already: together both would have the mean."""
    model = [
        layer(elements=100, kept=50, square_norm=100.0),
        layer(elements=100, kept=1, square_norm=1.0),
    ]
    link = Link(start_s=1.0, byte_s=0.0)
    assert mg_wfbp(model, link) == [Group(0, 2)]
    assert seamgs(model, link) == layer_by_layer(model)
    assert sparse_error(model[0].with_(model[1])) > sum(map(sparse_error, model))


def test_equal_densities_are_merged_like_dense_layers() -> None:
    model = [layer(elements=100, kept=10, square_norm=float(place)) for place in range(5)]
    link = Link(start_s=1.0, byte_s=1e-3)
    assert seamgs(model, link) == mg_wfbp(model, link)


@pytest.mark.parametrize("plan", [mg_wfbp, seamgs, fastest])
def test_no_layers_are_no_messages(plan: Callable[[Sequence[Layer], Link], list[Group]]) -> None:
    assert plan([], Link(start_s=1.0, byte_s=1.0)) == []


@given(layers(), links)
def test_every_layer_is_in_one_group(model: list[Layer], link: Link) -> None:
    for groups in (mg_wfbp(model, link), seamgs(model, link), fastest(model, link), by_bytes(model, 500)):
        places = [place for group in groups[::-1] for place in range(group.first, group.last)]
        assert places == list(range(len(model)))


@given(layers(), links)
def test_a_merge_of_seamgs_never_raises_the_sparse_error(model: list[Layer], link: Link) -> None:
    for group in seamgs(model, link):
        held = model[group.last - 1]
        for each in reversed(model[group.first : group.last - 1]):
            apart = sparse_error(held) + sparse_error(each)
            held = held.with_(each)
            assert sparse_error(held) <= apart + 1e-9 * held.square_norm


@given(layers(), links)
def test_merging_never_ends_later_than_layer_by_layer(model: list[Layer], link: Link) -> None:
    alone = end(model, link, layer_by_layer(model))
    for groups in (mg_wfbp(model, link), seamgs(model, link)):
        assert end(model, link, groups) <= alone + 1e-9


@given(layers(most=8), links)
def test_the_fastest_division_is_found(model: list[Layer], link: Link) -> None:
    least = min(end(model, link, groups) for groups in divisions(len(model)))
    assert end(model, link, fastest(model, link)) == pytest.approx(least)


def allowed(model: Sequence[Layer], groups: Sequence[Group]) -> bool:
    for group in groups:
        held = model[group.last - 1]
        for each in reversed(model[group.first : group.last - 1]):
            if not keeps_accuracy(held, each):
                return False
            held = held.with_(each)
    return True


@given(layers(most=8), links)
def test_the_fastest_division_that_keeps_accuracy_is_found(model: list[Layer], link: Link) -> None:
    kept = [groups for groups in divisions(len(model)) if allowed(model, groups)]
    least = min(end(model, link, groups) for groups in kept)
    assert end(model, link, fastest(model, link, keeps_accuracy)) == pytest.approx(least)
    assert end(model, link, seamgs(model, link)) >= least - 1e-9
