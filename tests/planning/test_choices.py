"""Options of a plan: their spelling, and the order of parts that follows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.common.spec import SpecError
from gradwire.planning import (
    Fusion,
    Layer,
    Link,
    Merging,
    Order,
    Replan,
    parse_fusion,
    parse_order,
    parse_replan,
)
from gradwire.planning.choices import CREDIT, MGS_BYTES, Ordering, turns

P3 = parse_order("p3")


@pytest.mark.parametrize(
    ("text", "fusion"),
    [
        ("none", Fusion(merging=Merging.NONE)),
        ("bytes", Fusion(merging=Merging.BYTES)),
        ("bytes=5000", Fusion(merging=Merging.BYTES, bytes=5000)),
        ("mgwfbp", Fusion(merging=Merging.MG_WFBP)),
        ("mgs", Fusion(merging=Merging.MGS, bytes=MGS_BYTES)),
        ("mgs=99", Fusion(merging=Merging.MGS, bytes=99)),
        ("seamgs", Fusion(merging=Merging.SEAMGS)),
    ],
)
def test_fusion_is_spelled_so(text: str, fusion: Fusion) -> None:
    assert parse_fusion(text) == fusion


def test_order_and_replanning_are_spelled_so() -> None:
    assert parse_order("credit") == Order(ordering=Ordering.CREDIT, credit=CREDIT)
    assert parse_order("credit=9") == Order(ordering=Ordering.CREDIT, credit=9)
    assert parse_order("two-phase") == Order(ordering=Ordering.TWO_PHASE)
    assert parse_replan("never") == Replan()
    assert parse_replan("drift") == Replan(drift=True)
    assert parse_replan("7") == Replan(every=7)


@pytest.mark.parametrize(
    ("parse", "text", "words"),
    [
        (parse_fusion, "seamg", "unknown fusion 'seamg' (did you mean 'seamgs'?)"),
        (parse_fusion, "seamgs=3", "fusion 'seamgs=3': seamgs takes no number"),
        (parse_fusion, "bytes=0", "expected a number from 1 after bytes=, got '0'"),
        (parse_fusion, "mgs=", "expected a number from 1 after mgs=, got ''"),
        (parse_order, "", "unknown order ''"),
        (parse_order, "p3=2", "p3 takes no number"),
        (parse_order, "credit=-1", "got '-1'"),
        (parse_replan, "0", "expected never, drift or a number of versions from 1, got '0'"),
        (parse_replan, "often", "got 'often'"),
    ],
)
def test_anything_else_is_refused(parse: object, text: str, words: str) -> None:
    assert callable(parse)
    with pytest.raises(SpecError) as caught:
        parse(text)
    assert words in str(caught.value)


def test_parts_that_come_in_order_have_no_turns() -> None:
    assert turns(parse_order("fifo"), [], [3, 1, 2], None) == ()


def test_what_is_nearest_the_input_goes_first() -> None:
    # Three units, the last layers first: parts 0 to 2, 3, and 4 to 5.
    assert turns(P3, [], [3, 1, 2], None) == (3, 4, 5, 2, 0, 1)
    assert turns(parse_order("two-phase"), [], [3, 1, 2], None) == turns(P3, [], [3, 1, 2], None)


@given(
    st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1e6)), min_size=1, max_size=9),
    st.data(),
)
def test_each_part_has_one_turn(times: list[tuple[float, float, float]], data: st.DataObject) -> None:
    units = [
        Layer(sent_bytes=sent, forward_s=forward, backward_s=backward) for forward, backward, sent in times
    ]
    parts = [data.draw(st.integers(1, 4)) for _ in units]
    link = Link(start_s=1e-3, byte_s=1e-6)
    for name in ("p3", "credit", "two-phase"):
        found = turns(parse_order(name), units, parts, link)
        assert sorted(found) == list(range(sum(parts)))
