"""Fusion against its formulas, by hand and at random."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.planning import Layer, Link, layers_of
from gradwire.planning.fusion import (
    FusionGroup,
    Reason,
    by_bytes,
    fastest,
    keeps_accuracy,
    layer_by_layer,
    reasons,
    seamgs,
)
from gradwire.planning.profile import joined, produced

SECONDS = st.floats(0, 1)

# The rule by time alone: any layer may join.
mg_wfbp = partial(seamgs, may=lambda later, earlier: True)


def sent(
    layers: Sequence[Layer], link: Link, groups: Sequence[FusionGroup]
) -> list[tuple[FusionGroup, float, float]]:
    """Return when the message of each group begins and ends, in seconds from the beginning of backward."""
    ready, free, found = produced(layers), 0.0, list[tuple[FusionGroup, float, float]]()
    for group in groups:
        start = max(ready[group.first], free)
        free = start + link.seconds(sum(layer.sent_bytes for layer in layers[group.first : group.last]))
        found.append((group, start, free))
    return found


def sparse_error(layer: Layer) -> float:
    """Return the squared norm of what sparsification leaves out: (2)."""
    return (1 - layer.density) * layer.square_norm


# Dense tensors, as many as anything else; equal densities; and any.
DENSITIES = st.just(1.0) | st.sampled_from([0.001, 0.01, 0.02]) | st.floats(1e-4, 1)


@st.composite
def layers(draw: st.DrawFn, most: int = 12, densities: st.SearchStrategy[float] = DENSITIES) -> list[Layer]:
    """Layers of sparse and of dense tensors, as the server and gc-plan make them."""
    count = draw(st.integers(1, most))

    def each(values: st.SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(values, min_size=count, max_size=count))

    elements, shares = each(st.integers(1, 10_000)), each(densities)
    return layers_of(
        elements,
        shares,
        sent_bytes=[2.0 * share * size for share, size in zip(shares, elements, strict=True)],
        forward_s=[0.0] * count,
        backward_s=each(SECONDS),
        square_norms=each(st.floats(0, 1e6)),
    )


links = st.builds(Link, start_s=SECONDS, byte_s=st.floats(0, 1e-3))


def divisions(count: int) -> Iterator[list[FusionGroup]]:
    """All of them, in the order of backward."""
    for cuts in product((False, True), repeat=count - 1):
        borders = [0, *(place + 1 for place, cut in enumerate(cuts) if cut), count]
        yield [FusionGroup(first, last) for first, last in pairwise(borders)][::-1]


def end(model: Sequence[Layer], link: Link, groups: Sequence[FusionGroup]) -> float:
    return sent(model, link, groups)[-1][2]


def layer(*, backward_s: float = 0.0, kept: float = 1, elements: int = 1, square_norm: float = 0.0) -> Layer:
    return Layer(
        sent_bytes=kept, backward_s=backward_s, sparse_elements=elements, kept=kept, square_norm=square_norm
    )


def dense(*, backward_s: float = 0.0, elements: int = 16, square_norm: float = 16.0) -> Layer:
    """A tensor of which everything is sent, as bfloat16."""
    return layers_of(
        [elements],
        [1.0],
        sent_bytes=[2.0 * elements],
        forward_s=[0.0],
        backward_s=[backward_s],
        square_norms=[square_norm],
    )[0]


def test_backward_produces_the_last_layer_first() -> None:
    assert produced([layer(backward_s=3.0), layer(backward_s=2.0), layer(backward_s=1.0)]) == [6.0, 3.0, 1.0]


def test_a_message_waits_for_its_gradients_and_for_the_one_before() -> None:
    model = [layer(backward_s=5.0, kept=1), layer(backward_s=1.0, kept=3), layer(backward_s=1.0, kept=2)]
    found = sent(model, Link(start_s=1.0, byte_s=1.0), layer_by_layer(model))
    assert [(start, end) for _, start, end in found] == [(1.0, 4.0), (4.0, 8.0), (8.0, 10.0)]


def test_messages_of_a_fixed_size_are_closed_once_they_have_it() -> None:
    model = [layer(kept=each) for each in (5, 1, 2, 4, 1)]
    assert by_bytes(model, 5) == [FusionGroup(3, 5), FusionGroup(0, 3)]
    assert by_bytes(model, 1e9) == [FusionGroup(0, 5)]
    assert by_bytes(model, 0) == layer_by_layer(model)


def test_layers_whose_gradients_come_long_after_each_other_are_not_merged() -> None:
    model = [layer(backward_s=10.0) for _ in range(4)]
    assert mg_wfbp(model, Link(start_s=1.0, byte_s=1.0)) == layer_by_layer(model)


def test_layers_whose_gradients_come_at_once_are_merged() -> None:
    model = [layer() for _ in range(4)]
    assert mg_wfbp(model, Link(start_s=1.0, byte_s=1.0)) == [FusionGroup(0, 4)]


def test_a_merge_that_raises_the_error_is_not_made_for_accuracy() -> None:
    """The layer that weighs more has the higher density already: together both would have the mean."""
    model = [layer(elements=100, kept=50, square_norm=100.0), layer(elements=100, kept=1, square_norm=1.0)]
    link = Link(start_s=1.0, byte_s=0.0)
    assert mg_wfbp(model, link) == [FusionGroup(0, 2)]
    assert seamgs(model, link) == layer_by_layer(model)
    assert sparse_error(model[0].with_(model[1])) > sum(map(sparse_error, model))


def test_equal_densities_are_merged_like_dense_layers() -> None:
    model = [layer(elements=100, kept=10, square_norm=float(place)) for place in range(5)]
    link = Link(start_s=1.0, byte_s=1e-3)
    assert seamgs(model, link) == mg_wfbp(model, link)


def test_densities_that_only_rounding_makes_different_are_equal() -> None:
    """One element in 100 of 432 and of 36,864, whose sums as floats need not be equal either."""
    sizes = [432, 2304, 4608, 9216, 18_432, 36_864, 640] * 5
    model = layers_of(
        sizes,
        [1 / 100] * len(sizes),
        sent_bytes=[0.0] * len(sizes),
        forward_s=[0.0] * len(sizes),
        backward_s=[0.0] * len(sizes),
        square_norms=[float(place) for place in range(len(sizes))],
    )
    assert seamgs(model, Link(start_s=1.0, byte_s=0.0)) == [FusionGroup(0, len(sizes))]


def test_dense_tensors_between_sparse_ones_forbid_no_merge() -> None:
    """A convolution has a thousandth of the weight of its normalization, and a hundredth of its density."""
    convolution = layer(elements=1000, kept=10, square_norm=1.0)
    model = [convolution, dense(), dense(), convolution, dense(), dense()]
    assert seamgs(model, Link(start_s=1.0, byte_s=0.0)) == [FusionGroup(0, 6)]


def test_dense_tensors_do_not_hide_what_the_sparse_ones_beside_them_lose() -> None:
    """Neither do they join what has to stay apart: the error is that of the convolutions."""
    heavy = layer(elements=100, kept=50, square_norm=100.0)
    light = layer(elements=100, kept=1, square_norm=1.0)
    model = [heavy, dense(), dense(), light, dense()]
    assert seamgs(model, Link(start_s=1.0, byte_s=0.0)) == [FusionGroup(1, 5), FusionGroup(0, 1)]


def test_what_is_sent_whole_counts_for_no_error() -> None:
    model = [dense(), layer(elements=100, kept=25, square_norm=8.0), dense()]
    assert [sparse_error(each) for each in (*model, joined(model))] == [0.0, 6.0, 0.0, 6.0]


@given(layers(densities=st.just(1.0)), links)
def test_without_sparse_tensors_seamgs_is_the_time_rule(model: list[Layer], link: Link) -> None:
    assert seamgs(model, link) == mg_wfbp(model, link)


@pytest.mark.parametrize("plan", [mg_wfbp, seamgs, fastest])
def test_no_layers_are_no_messages(plan: Callable[[Sequence[Layer], Link], list[FusionGroup]]) -> None:
    assert plan([], Link(start_s=1.0, byte_s=1.0)) == []


@given(layers(), links)
def test_every_layer_is_in_one_group(model: list[Layer], link: Link) -> None:
    for groups in (mg_wfbp(model, link), seamgs(model, link), fastest(model, link), by_bytes(model, 500)):
        places = [place for group in groups[::-1] for place in range(group.first, group.last)]
        assert places == list(range(len(model)))


@given(layers(), links)
def test_a_merge_of_seamgs_never_raises_the_sparse_error(model: list[Layer], link: Link) -> None:
    """The error is that of the sparse tensors: dense ones have none."""
    for group in seamgs(model, link):
        held = model[group.last - 1]
        for each in reversed(model[group.first : group.last - 1]):
            apart = sparse_error(held) + sparse_error(each)
            held = held.with_(each)
            # Squares of the smallest floats have no digits left to round.
            assert sparse_error(held) <= apart + 1e-9 * held.square_norm + sys.float_info.min


@given(layers(), links)
def test_merging_never_ends_later_than_layer_by_layer(model: list[Layer], link: Link) -> None:
    alone = end(model, link, layer_by_layer(model))
    for groups in (mg_wfbp(model, link), seamgs(model, link)):
        assert end(model, link, groups) <= alone + 1e-9


@given(layers(most=8), links)
def test_the_fastest_division_is_found(model: list[Layer], link: Link) -> None:
    least = min(end(model, link, groups) for groups in divisions(len(model)))
    assert end(model, link, fastest(model, link)) == pytest.approx(least)


def allowed(model: Sequence[Layer], groups: Sequence[FusionGroup]) -> bool:
    for group in groups:
        held = model[group.last - 1]
        for each in reversed(model[group.first : group.last - 1]):
            if not keeps_accuracy(held, each):
                return False
            held = held.with_(each)
    return True


@given(layers(most=8), links)
def test_seamgs_never_ends_before_the_best_that_keeps_accuracy(model: list[Layer], link: Link) -> None:
    kept = [groups for groups in divisions(len(model)) if allowed(model, groups)]
    least = min(end(model, link, groups) for groups in kept)
    assert end(model, link, seamgs(model, link)) >= least - 1e-9


def test_each_pair_that_is_not_merged_has_its_reason() -> None:
    heavy = layer(elements=100, kept=50, square_norm=100.0)
    light = layer(elements=100, kept=1, square_norm=1.0)
    model = [replace(heavy, backward_s=9.0), heavy, light, light]
    found = [Reason.TIME, Reason.ACCURACY, None]
    assert reasons(model, Link(start_s=1.0, byte_s=0.0)) == found
    assert reasons([], Link(start_s=1.0, byte_s=0.0)) == []


@given(layers(), links)
def test_the_sparse_error_of_all_groups_is_at_most_that_of_all_layers(model: list[Layer], link: Link) -> None:
    """Over the tensors from which a sparsifier chooses, (1 - k/d) times the square norm, by hand."""
    error = 0.0
    for group in seamgs(model, link):
        sparse = [each for each in model[group.first : group.last] if each.sparse_elements]
        if sparse:
            kept = sum(each.kept for each in sparse) / sum(each.sparse_elements for each in sparse)
            error += (1 - kept) * sum(each.square_norm for each in sparse)
    alone = sum(
        (1 - each.kept / each.sparse_elements) * each.square_norm for each in model if each.sparse_elements
    )
    assert error <= alone * (1 + 1e-9) + 1e-6


def greedy_by_time(model: Sequence[Layer], link: Link) -> list[FusionGroup]:
    """Return the groups of MG-WFBP's greedy rule, from its definition.

    Layer l is merged into l - 1 if its message would still be in its start when l - 1 is produced. A group
    starts when its first layer does.
    """
    ready = produced(model)
    merged = [False] * len(model)  # whether a layer goes with the one before it
    for index in reversed(range(1, len(model))):
        groups = divided(merged)
        last = next(group for group in groups if group.first == index)
        start, free = 0.0, 0.0
        for group in groups:
            start = max(ready[group.first], free)
            if group == last:
                break
            free = start + link.seconds(
                sum(each.sent_bytes for each in model[group.first : group.last][::-1])
            )
        merged[index] = start + link.start_s > ready[index - 1]
    return divided(merged)


def divided(merged: Sequence[bool]) -> list[FusionGroup]:
    borders = [*(index for index, each in enumerate(merged) if not each), len(merged)]
    return [FusionGroup(first, last) for first, last in pairwise(borders)][::-1]


@given(layers(), links)
def test_seamgs_with_neutral_norms_is_the_greedy_rule_by_time(model: list[Layer], link: Link) -> None:
    """With one weight for all sparse tensors Q2 holds for every pair."""
    neutral = [replace(each, square_norm=float(each.sparse_elements)) for each in model]
    assert seamgs(neutral, link) == greedy_by_time(neutral, link)
