"""A simulated step against what has to be done before what, by hand and at random."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.planning import Layer, Link
from gradwire.planning.schedules import Schedule, run
from gradwire.planning.step import Overlap, Piece, Span, StepResources, StepWork, Timeline, UnitWork, simulate

OVERLAPS: tuple[Overlap, ...] = ("off", "backward", "both")
SECONDS = st.floats(0, 1)
FREE = Link(start_s=0.0, byte_s=0.0)


@st.composite
def works(draw: st.DrawFn) -> StepWork:
    """Units of one to three parts."""
    batches, pieces = list[UnitWork](), list[Piece]()
    for unit in range(draw(st.integers(1, 6))):
        parts = range(len(pieces), len(pieces) + draw(st.integers(1, 3)))
        batches.append(
            UnitWork(parts=parts, backward_s=draw(SECONDS), forward_s=draw(SECONDS), encode_s=draw(SECONDS))
        )
        for _ in parts:
            pieces.append(
                Piece(
                    unit=unit,
                    up_bytes=draw(st.floats(0, 100)),
                    down_bytes=draw(st.floats(0, 100)),
                    pushes=draw(st.integers(1, 4)),
                    server_s=draw(SECONDS),
                    apply_s=draw(SECONDS),
                    turn=draw(st.integers(0, 9)),
                )
            )
    overlap = draw(st.sampled_from(OVERLAPS))
    return StepWork(
        batches=batches,
        pieces=pieces,
        workers=4,
        overlap=overlap,
        early=overlap == "both" and draw(st.booleans()),
        credit=draw(st.integers(0, 3)),
    )


links = st.builds(Link, start_s=st.floats(0, 0.1), byte_s=st.floats(0, 1e-2))
places = st.builds(
    StepResources,
    server=links,
    worker=links,
    rtt_s=st.floats(0, 0.5),
    byte_s=st.floats(0, 1e-3),
    part_s=st.floats(0, 0.1),
    step_s=st.floats(0, 0.1),
    cores=st.none() | st.integers(1, 8),
)


def by_what(timeline: Timeline) -> dict[str, dict[int, Span]]:
    found: dict[str, dict[int, Span]] = defaultdict(dict)
    for span in timeline.spans:
        assert span.number not in found[span.kind]
        found[span.kind][span.number] = span
    return found


@given(works(), places)
def test_nothing_begins_before_what_it_needs(work: StepWork, place: StepResources) -> None:
    timeline = simulate(work, place)
    found = by_what(timeline)
    parts, units = range(len(work.pieces)), range(len(work.batches))
    for what in ("up", "sum", "down", "apply"):
        assert found[what].keys() == set(parts)
    for what in ("backward", "compress", "forward"):
        assert found[what].keys() == set(units)

    slack, half = 1e-9, place.rtt_s / 2
    for number, batch in enumerate(work.batches):
        compressed = found["compress"][number]
        assert found["backward"][number].end_s <= compressed.start_s + slack
        for part in batch.parts:
            assert compressed.end_s <= found["up"][part].start_s + slack
    if work.overlap == "off":
        last = max(span.end_s for span in found["backward"].values())
        assert all(last <= span.start_s + slack for span in found["compress"].values())
    for part in parts:
        there = found["up"][part].end_s
        if work.overlap != "both":
            there = max(span.end_s for span in found["up"].values())
        assert there + half <= found["sum"][part].start_s + slack
        assert found["sum"][part].end_s <= found["down"][part].start_s + slack
        assert found["down"][part].end_s + half <= found["apply"][part].start_s + slack
    for number in units:
        begins = found["forward"][number].start_s
        for part in work.batches[number].parts if work.early else parts:
            assert found["apply"][part].end_s <= begins + slack
        if number + 1 in units:
            assert found["forward"][number + 1].end_s <= begins + slack
            assert found["backward"][number].end_s <= found["backward"][number + 1].start_s + slack
    assert timeline.step_s >= max(span.end_s for span in timeline.spans) + place.rtt_s - slack


@given(
    st.lists(st.tuples(st.floats(1, 1000), st.floats(0.01, 1), SECONDS), min_size=1, max_size=8),
    st.booleans(),
)
def test_a_step_is_what_the_schedule_says_where_only_the_way_up_takes_time(
    layers: list[tuple[float, float, float]], first_first: bool
) -> None:
    model = [
        Layer(sent_bytes=size, backward_s=backward, forward_s=forward) for size, backward, forward in layers
    ]
    link = Link(start_s=0.0, byte_s=1e-3)
    planned = run(model, link, Schedule(name="p3" if first_first else "fifo"))
    count = len(model)
    work = StepWork(
        batches=[
            UnitWork(parts=range(unit, unit + 1), backward_s=layer.backward_s, forward_s=layer.forward_s)
            for unit, layer in enumerate(reversed(model))
        ],
        pieces=[
            Piece(unit=unit, up_bytes=layer.sent_bytes, down_bytes=0.0, pushes=1, turn=turn)
            for unit, layer in enumerate(reversed(model))
            for turn in [count - unit if first_first else unit]
        ],
        workers=1,
        overlap="both",
        early=True,
    )
    found = simulate(work, StepResources(server=link, worker=FREE))
    assert found.step_s == pytest.approx(planned.end_s)


@given(works(), places)
def test_a_lane_has_one_thing_at_a_time(work: StepWork, place: StepResources) -> None:
    lanes: dict[str, list[Span]] = defaultdict(list)
    for span in simulate(work, place).spans:
        lanes[span.lane].append(span)
    for spans in lanes.values():
        ordered = sorted(spans, key=lambda span: (span.start_s, span.end_s))
        for before, after in pairwise(ordered):
            assert before.end_s <= after.start_s + 1e-9


@given(works(), places)
def test_as_many_parts_are_on_their_way_as_may_be(work: StepWork, place: StepResources) -> None:
    found = by_what(simulate(work, place))
    if not work.credit:
        return
    for span in found["up"].values():
        # Begun before this one, and not heard of: they were there a round trip ago at most.
        open_ = [
            each
            for each in found["up"].values()
            if each.start_s < span.start_s - 1e-9 < each.end_s + place.rtt_s - 2e-9
        ]
        assert len(open_) < work.credit


def alone(work: StepWork) -> StepWork:
    """Without what can make more overlap take longer: turns that send what is needed last first, processors
    that lanes share."""
    pieces = [replace(piece, turn=part) for part, piece in enumerate(work.pieces)]
    return replace(work, pieces=pieces, credit=0, early=False)


@given(works(), links, st.floats(0, 0.5))
def test_more_overlap_takes_no_longer(work: StepWork, link: Link, rtt_s: float) -> None:
    work = alone(work)
    place = StepResources(server=link, worker=FREE, rtt_s=rtt_s)
    off, backward, both = (simulate(replace(work, overlap=each), place).step_s for each in OVERLAPS)
    early = simulate(replace(work, overlap="both", early=True), place).step_s
    assert early <= both + 1e-6
    assert both <= backward + 1e-6
    assert backward <= off + 1e-6


@given(works(), links, st.floats(0.1, 1.0))
def test_a_faster_link_takes_no_longer(work: StepWork, link: Link, faster: float) -> None:
    work = alone(work)
    quick = Link(start_s=link.start_s, byte_s=faster * link.byte_s)
    slow = simulate(work, StepResources(server=link, worker=FREE)).step_s
    assert simulate(work, StepResources(server=quick, worker=FREE)).step_s <= slow + 1e-6


def least(overlap: Overlap, produced: Sequence[float], shares: Sequence[float], way: float) -> float:
    """The seconds of a step if only links and computation take time. produced: of each part, from backward's
    beginning. shares: of each part's bytes. way: seconds of all bytes, in each direction."""
    uploaded = max(produced) if overlap == "off" else 0.0
    uploads = list[float]()
    for ready, share in zip(produced, shares, strict=True):
        uploaded = max(uploaded, ready) + share * way
        uploads.append(uploaded)
    downloaded = 0.0
    for arrived, share in zip(uploads, shares, strict=True):
        downloaded = max(downloaded, arrived if overlap == "both" else uploaded) + share * way
    return downloaded


@given(
    st.lists(st.tuples(SECONDS, st.floats(0, 100)), min_size=1, max_size=8),
    SECONDS,
    st.floats(0, 1e-2),
    st.sampled_from(OVERLAPS),
)
def test_links_and_computation_alone_take_what_the_bound_says(
    units: list[tuple[float, float]], forward_s: float, byte_s: float, overlap: Overlap
) -> None:
    """A part for each unit; 4 workers."""
    count = len(units)
    sizes = [size for _, size in units]
    work = StepWork(
        batches=[
            UnitWork(
                parts=range(part, part + 1),
                backward_s=seconds,
                forward_s=forward_s if part == count - 1 else 0.0,
            )
            for part, (seconds, _) in enumerate(units)
        ],
        pieces=[
            Piece(unit=part, up_bytes=size, down_bytes=size, pushes=4, turn=part)
            for part, size in enumerate(sizes)
        ],
        workers=4,
        overlap=overlap,
    )
    found = simulate(work, StepResources(server=Link(start_s=0.0, byte_s=byte_s), worker=FREE)).step_s
    total = sum(sizes)
    way = 4 * byte_s * total
    produced, at = list[float](), forward_s
    for seconds, _ in units:
        at += seconds
        produced.append(at)
    shares = [size / total if total else 0.0 for size in sizes]
    assert found == pytest.approx(least(overlap, produced, shares, way), abs=1e-6)


def one_part() -> StepWork:
    piece = Piece(unit=0, up_bytes=10, down_bytes=10, pushes=4, server_s=2.0, apply_s=1.0)
    batch = UnitWork(parts=range(1), backward_s=3.0, forward_s=1.0, encode_s=1.0)
    return StepWork(batches=[batch], pieces=[piece], workers=4)


def test_one_part_goes_through_all_lanes() -> None:
    place = StepResources(server=Link(start_s=0.5, byte_s=0.1), worker=FREE, rtt_s=1.0, step_s=0.25)
    # Backward 3, compressing 1, up 4.5 and half a round trip, the server 2, down 4.5 and half a round trip,
    # taking in 1, forward 1, a round trip, and what a step takes.
    assert simulate(one_part(), place).step_s == pytest.approx(3 + 1 + 5 + 2 + 5 + 1 + 1 + 1 + 0.25)


def test_workers_on_one_machine_share_its_cores() -> None:
    place = StepResources(server=FREE, worker=FREE)
    apart = simulate(one_part(), place)
    together = simulate(one_part(), replace(place, cores=2))
    # Four workers compress and take in on two cores: both take twice as long. The server has one of them.
    assert (apart.step_s, together.step_s) == (8.0, 10.0)
    assert apart.cpu_s == together.cpu_s == 4 * (1 + 1) + 2


def test_of_what_waits_the_least_turn_goes_first() -> None:
    pieces = [Piece(unit=part, up_bytes=1, down_bytes=1, pushes=1, turn=2 - part) for part in range(3)]
    batches = [UnitWork(parts=range(part, part + 1), backward_s=0.1) for part in range(3)]
    work = StepWork(batches=batches, pieces=pieces, workers=1)
    found = by_what(simulate(work, StepResources(server=Link(start_s=0.0, byte_s=1.0), worker=FREE)))["up"]
    # The last tensor's part is on its way when the others come; then that of the first overtakes.
    assert sorted(found, key=lambda part: found[part].start_s) == [0, 2, 1]
