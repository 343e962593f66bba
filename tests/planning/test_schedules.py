"""Schedules against the rules of which gradients may travel when, by hand and at random."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.planning import Layer, Link
from gradwire.planning.profile import produced
from gradwire.planning.schedules import MessageTimeline, Schedule, best, run, two_phase

SECONDS = st.floats(0, 1)


def layer(sent_bytes: float, *, backward_s: float = 0.0, forward_s: float = 0.0) -> Layer:
    return Layer(sent_bytes=sent_bytes, backward_s=backward_s, forward_s=forward_s)


models = st.lists(
    st.builds(
        Layer,
        sent_bytes=st.floats(0, 1000),
        forward_s=SECONDS,
        backward_s=SECONDS,
    ),
    min_size=1,
    max_size=8,
)
links = st.builds(Link, start_s=SECONDS, byte_s=st.floats(0, 1e-2))
schedules = st.one_of(
    st.just(Schedule(name="fifo")),
    st.builds(Schedule, name=st.just("p3"), piece_bytes=st.floats(50, 2000)),
)
LINK = Link(start_s=1.0, byte_s=1.0)


def order(timeline: MessageTimeline) -> list[tuple[int, int]]:
    return [(message.layer, message.pieces) for message in timeline.messages]


def test_fifo_sends_layers_whole_as_backward_produces_them() -> None:
    model = [layer(4, backward_s=1, forward_s=2), layer(2, backward_s=1, forward_s=1)]
    found = run(model, LINK, Schedule(name="fifo", piece_bytes=1.0))
    assert order(found) == [(1, 2), (0, 4)]
    assert [(each.start_s, each.end_s) for each in found.messages] == [(1, 4), (4, 9)]
    assert found.forward_s == (9, 11)
    assert found.end_s == 12


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
    """The time of starting counts once, not six times, before the first layers are there."""
    model = [layer(1, backward_s=4, forward_s=1), layer(1, backward_s=4, forward_s=1), layer(6, backward_s=1)]
    found = two_phase(model, LINK, 1.0)
    assert 2 in found.raised
    assert run(model, LINK, found).end_s < run(model, LINK, Schedule(name="two-phase", piece_bytes=1.0)).end_s


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
        taken[message.layer] += message.end_s - message.start_s - link.start_s
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
def test_the_schedule_that_is_used_is_never_slower_than_p3_or_fifo(
    model: list[Layer], link: Link, piece_bytes: float
) -> None:
    paper = two_phase(model, link, piece_bytes)
    holds(model, link, paper, run(model, link, paper))
    end = run(model, link, best(model, link, piece_bytes)).end_s
    for other in (paper, Schedule(name="p3", piece_bytes=piece_bytes), Schedule(name="fifo")):
        assert end <= run(model, link, other).end_s
