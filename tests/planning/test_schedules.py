"""Schedules against the rules of which gradients may travel when, by hand and at random."""

from __future__ import annotations

import math
from collections import defaultdict
from random import Random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.planning import Layer, Link
from gradwire.planning.profile import produced
from gradwire.planning.schedules import MessageTimeline, Schedule, run, two_phase

SECONDS = st.floats(0, 1)


def layer(sent_bytes: float, *, backward_s: float = 0.0, forward_s: float = 0.0) -> Layer:
    return Layer(sent_bytes=sent_bytes, backward_s=backward_s, forward_s=forward_s)


models = st.lists(
    st.builds(Layer, sent_bytes=st.floats(0, 1000), forward_s=SECONDS, backward_s=SECONDS),
    min_size=1,
    max_size=8,
)
links = st.builds(Link, start_s=SECONDS, byte_s=st.floats(0, 1e-2))
schedules = st.one_of(
    st.just(Schedule(name="fifo")), st.builds(Schedule, name=st.just("p3"), piece_bytes=st.floats(50, 2000))
)
LINK = Link(start_s=1.0, byte_s=1.0)


def order(timeline: MessageTimeline) -> list[tuple[int, int]]:
    return [(message.layer, message.pieces) for message in timeline.messages]


def test_fifo_sends_layers_whole_as_backward_produces_them() -> None:
    model = [layer(4, backward_s=1, forward_s=2), layer(2, backward_s=1, forward_s=1)]
    found = run(model, LINK, Schedule(name="fifo", piece_bytes=1.0))
    assert order(found) == [(1, 2), (0, 4)]
    assert [(each.start_s, each.end_s) for each in found.messages] == [(1, 5), (5, 13)]
    assert found.forward_s == (13, 15)
    assert found.end_s == 16


def test_p3_lets_the_first_layer_overtake_where_a_piece_ends() -> None:
    model = [layer(2, backward_s=2), layer(4, backward_s=1)]
    found = run(model, LINK, Schedule(name="p3", piece_bytes=2.0))
    assert order(found) == [(1, 1), (0, 1), (1, 1)]
    assert found.forward_s[0] == found.messages[1].end_s


def test_pieces_are_of_equal_size_but_for_the_last() -> None:
    found = run([layer(5)], Link(start_s=0.0, byte_s=1.0), Schedule(name="p3", piece_bytes=2.0))
    assert [each.end_s - each.start_s for each in found.messages] == [2, 2, 1]


def test_what_is_left_after_backward_goes_in_one_message_for_each_layer() -> None:
    model = [layer(4), layer(4, backward_s=1), layer(4, backward_s=1)]
    schedule = Schedule(name="two-phase", piece_bytes=1.0)
    assert order(run(model, LINK, schedule)) == [(2, 1), (0, 4), (1, 4), (2, 3)]


def test_a_raised_layer_goes_whole_before_those_that_wait() -> None:
    model = [layer(2, backward_s=1), layer(2, backward_s=20), layer(2, backward_s=1), layer(2, backward_s=1)]
    schedule = Schedule(name="two-phase", piece_bytes=1.0, raised={3: 2})
    assert order(run(model, LINK, schedule)) == [(3, 2), (2, 1), (2, 1), (1, 1), (0, 2), (1, 1)]


def test_two_phase_raises_a_layer_where_that_makes_the_iteration_shorter() -> None:
    """Raised, the last layer has gone before the first one's gradient is there, which p3 keeps waiting."""
    model = [
        layer(8, backward_s=5, forward_s=3),
        layer(6, backward_s=5, forward_s=6),
        layer(3, backward_s=5, forward_s=5),
        layer(8, backward_s=4),
    ]
    found = two_phase(model, LINK, 4.0)
    assert found.raised == {3: 2}
    assert run(model, LINK, Schedule(name="p3", piece_bytes=4.0)).end_s == 47
    assert run(model, LINK, found).end_s == 43


def test_a_merged_message_pays_for_each_of_its_pieces() -> None:
    model = [layer(4), layer(4, backward_s=1)]
    merged = run(model, LINK, Schedule(name="two-phase", piece_bytes=2.0))
    assert [(each.pieces, each.end_s - each.start_s) for each in merged.messages] == [(2, 6), (2, 6)]
    raised = Schedule(name="two-phase", piece_bytes=2.0, raised={1: 1})
    assert run(model, LINK, raised).messages[0].end_s == 7


def test_a_schedule_without_room_for_anything_is_refused() -> None:
    with pytest.raises(ValueError, match="expected"):
        run([layer(1)], LINK, Schedule(name="p3", piece_bytes=0.0))


def holds(model: list[Layer], link: Link, schedule: Schedule, timeline: MessageTimeline) -> None:
    """(4) and (5) as corrected; every byte goes once."""
    ready = produced(model)
    for message in timeline.messages:
        assert message.start_s >= ready[message.layer]
        assert message.end_s >= message.start_s
    for before, after in zip(timeline.messages, timeline.messages[1:], strict=False):
        assert after.start_s >= before.end_s
    taken = defaultdict[int, float](float)
    for message in timeline.messages:
        taken[message.layer] += message.end_s - message.start_s - message.pieces * link.start_s
        assert timeline.forward_s[message.layer] >= message.end_s
    for place, each in enumerate(model):
        assert taken[place] == pytest.approx(link.byte_s * each.sent_bytes, abs=1e-9)
    for place in range(1, len(model)):
        assert timeline.forward_s[place] >= timeline.forward_s[place - 1] + model[place - 1].forward_s
    assert timeline.forward_s[0] >= max(ready)
    assert timeline.end_s == timeline.forward_s[-1] + model[-1].forward_s


@given(models, links, schedules)
def test_no_schedule_sends_what_is_not_there(model: list[Layer], link: Link, schedule: Schedule) -> None:
    holds(model, link, schedule, run(model, link, schedule))


@given(models, links, st.floats(50, 2000))
def test_two_phase_ends_no_later_than_p3_and_p3_no_later_than_fifo(
    model: list[Layer], link: Link, piece_bytes: float
) -> None:
    paper = two_phase(model, link, piece_bytes)
    found = run(model, link, paper)
    holds(model, link, paper, found)
    p3, fifo = (run(model, link, Schedule(name=name, piece_bytes=piece_bytes)) for name in ("p3", "fifo"))
    assert found.end_s <= p3.end_s + 1e-9
    assert p3.end_s <= fifo.end_s + 1e-9


@given(models, links, st.floats(50, 2000))
def test_no_order_ends_sooner_than_p3_by_more_than_a_piece(
    model: list[Layer], link: Link, piece_bytes: float
) -> None:
    """The bound is for any order: of the layers up to one, none is ready before it, and some layer arrives
    last, which the forward passes from that one on follow."""
    ready = produced(model)
    least = max(ready) + sum(each.forward_s for each in model)
    taken = 0.0
    for place, each in enumerate(model):
        pieces = max(1, math.ceil(each.sent_bytes / piece_bytes))
        taken += pieces * link.start_s + link.byte_s * each.sent_bytes
        least = max(least, ready[place] + taken + sum(other.forward_s for other in model[place:]))
    piece = max(link.start_s + link.byte_s * min(each.sent_bytes, piece_bytes) for each in model)
    for name in ("p3", "two-phase"):
        end = run(model, link, Schedule(name=name, piece_bytes=piece_bytes)).end_s
        assert least - 1e-9 <= end <= least + piece + 1e-9


def test_where_link_and_backward_take_equally_long_two_phase_gains_less_than_a_hundredth() -> None:
    """100 random models of 20 layers, in pieces of a fifth of the mean layer."""
    random, gains, fifo_loses = Random(5), list[float](), list[float]()
    for _ in range(100):
        sizes = [random.expovariate(1.0) for _ in range(20)]
        backward = [random.expovariate(1.0) for _ in range(20)]
        piece = fmean(sizes) / 5
        starts = sum(max(1, math.ceil(each / piece)) for each in sizes)
        seconds = sum(backward)
        # A fifth of the link's time is for starting.
        link = Link(start_s=0.2 * seconds / starts, byte_s=0.8 * seconds / sum(sizes))
        model = [
            layer(size, backward_s=each, forward_s=each / 2)
            for size, each in zip(sizes, backward, strict=True)
        ]
        p3 = run(model, link, Schedule(name="p3", piece_bytes=piece)).end_s
        gains.append(1 - run(model, link, two_phase(model, link, piece)).end_s / p3)
        fifo_loses.append(run(model, link, Schedule(name="fifo", piece_bytes=piece)).end_s / p3 - 1)
    assert fmean(gains) < 0.001 < 0.005 < max(gains) < 0.006
    assert min(fifo_loses) > -1e-9
    assert fmean(fifo_loses) == pytest.approx(0.049, abs=0.001)
