"""The plan on the wire: whatever divides a model comes back the same, and nothing else is taken."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.common.parts import ALIGNMENT, Plan, arrange
from gradwire.proto import messages as m
from gradwire.proto.manifest import Manifest
from gradwire.proto.plans import plan_message, plan_of
from gradwire.proto.refusal import Reason, Refused
from gradwire.proto.transfer import MAX_PARTS
from gradwire.proto.wire import decode_envelope, encode_server


def manifest(sizes: Sequence[int]) -> Manifest:
    """sizes: elements of each tensor. All but the first are of another group."""
    made = [
        m.Tensor(name=f"t{place}", shape=(size,), dtype="float32", group=int(place > 0))
        for place, size in enumerate(sizes)
    ]
    return Manifest(tuple(made), 8)


SIZES = (0, 3, 10 * ALIGNMENT, 2 * ALIGNMENT + 5, 7)
MODEL = manifest(SIZES)
CUT = 3 + 4 * ALIGNMENT  # in the third tensor
GOOD = m.PlanAnnouncement(number=3, tensors=(1, 1, 1, 2), cuts=(CUT, CUT + ALIGNMENT))


def through_the_wire(plan: Plan, of: Manifest) -> Plan:
    message = decode_envelope(encode_server(plan_message(plan)), "ServerMessage")
    assert isinstance(message, m.PlanAnnouncement)
    return plan_of(message, of)


@st.composite
def divided(draw: st.DrawFn) -> tuple[Manifest, Plan]:
    """Any model, in any units, with any cuts that these may have."""
    sizes = draw(st.lists(st.integers(0, 5 * ALIGNMENT), min_size=1, max_size=8))
    last, units, cuts, start = len(sizes), list[int](), list[int](), sum(sizes)
    while last:
        units.append(draw(st.integers(1, last)))
        last -= units[-1]
        start -= sum(sizes[last : last + units[-1]])
        if units[-1] == 1:
            inside = range(start + ALIGNMENT, start + sizes[last], ALIGNMENT)
            cuts += [cut for cut in inside if draw(st.booleans())]
    of = manifest(sizes)
    plan = arrange(sizes, units, sorted(cuts), draw(st.integers(1, 99)))
    turns = draw(st.just(()) | st.permutations(range(len(plan.parts))).map(tuple))
    merged, credit = draw(st.booleans()), draw(st.integers(0, 9))
    each = st.floats(0, 2.0**100, width=32)
    norms = tuple(draw(st.just([]) | st.lists(each, min_size=len(sizes), max_size=len(sizes))))
    return of, dataclasses.replace(plan, merged=merged, turns=turns, credit=credit, norms=norms)


@given(divided())
def test_any_plan_comes_back_as_it_was_and_holds_every_element_once(given_: tuple[Manifest, Plan]) -> None:
    of, plan = given_
    assert through_the_wire(plan, of) == plan
    ranges = sorted((part.start, part.end) for part in plan.parts)
    assert ranges[0][0] == 0
    assert ranges[-1][1] == of.elements
    assert all(before[1] == after[0] for before, after in pairwise(ranges))


@pytest.mark.parametrize("part_bytes", [1, 1 << 16, 1 << 30])
def test_the_first_plan_of_a_job_is_one_that_workers_take(part_bytes: int) -> None:
    plan = MODEL.plan(part_bytes, slices=3)
    assert through_the_wire(plan, MODEL) == plan


def test_a_plan_of_many_tensors_takes_few_bytes() -> None:
    many = manifest([5] * 15_000)
    plan = arrange([5] * 15_000, [1] * 15_000, [])
    assert through_the_wire(plan, many) == plan
    assert len(encode_server(plan_message(plan))) < 20_000


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"number": 0}, "plan number: expected at least 1, got 0"),
        ({"tensors": ()}, "plan tensors: expected 5 in all, got 0"),
        ({"tensors": (1, 1, 1, 1)}, "plan tensors: expected 5 in all, got 4"),
        ({"tensors": (1, 1, 1, 3)}, "plan tensors: expected 5 in all, got 6"),
        ({"tensors": (1, 1, 1, 2**32 - 1)}, "expected 5 in all"),
        ({"tensors": (1, 1, 1, 0, 2)}, "plan tensors: expected at least 1 in each unit, got 0"),
        ({"tensors": (1, 2, 2)}, "unit 1, from 't2',: expected none in several tensors, got 2"),
        ({"cuts": (CUT, CUT)}, "plan cuts: expected ascending ones"),
        ({"cuts": (CUT + ALIGNMENT, CUT)}, "plan cuts: expected ascending ones"),
        ({"cuts": (CUT - 3,)}, f"unit 2, from 't2',: expected multiples of {ALIGNMENT} elements"),
        ({"cuts": (0,)}, "plan cuts: expected all of them within units, got 1 elsewhere"),
        ({"cuts": (3,)}, "all of them within units, got 1 elsewhere"),
        ({"cuts": (sum(SIZES),)}, "all of them within units, got 1 elsewhere"),
        ({"cuts": (2**63,)}, "all of them within units, got 1 elsewhere"),
        ({"turns": (0, 1, 2, 3, 4)}, "turns: expected each number from 0 to 5 once, or none, got 5"),
        ({"turns": (0, 1, 2, 3, 4, 4)}, "got 6, 5 of them different"),
        ({"turns": (1, 2, 3, 4, 5, 6)}, "each number from 0 to 5 once"),
        ({"norms": (1.0, 2.0)}, "plan norms: expected 5, or none, got 2"),
        ({"norms": (1.0, 2.0, -1.0, 0.0, 0.0)}, "norms: expected finite ones of at least 0, got -1"),
        ({"norms": (1.0, 2.0, 0.0, 0.0, math.nan)}, "norms: expected finite ones of at least 0, got nan"),
        ({"norms": (1.0, 2.0, 0.0, 0.0, math.inf)}, "norms: expected finite ones of at least 0, got inf"),
        ({"cuts": tuple(range(MAX_PARTS))}, f"at most {MAX_PARTS} parts"),
    ],
)
def test_a_plan_that_the_model_cannot_have_is_refused(changes: dict[str, Any], words: str) -> None:
    assert len(plan_of(GOOD, MODEL).parts) == 6
    with pytest.raises(Refused) as caught:
        plan_of(dataclasses.replace(GOOD, **changes), MODEL, worker="w")
    assert caught.value.refusal.reason is Reason.PLAN
    assert words in str(caught.value)


@given(st.lists(st.integers(0, 6), max_size=8), st.lists(st.integers(0, sum(SIZES) + ALIGNMENT), max_size=4))
def test_whatever_is_taken_is_a_plan_of_the_model(tensors: list[int], cuts: list[int]) -> None:
    try:
        plan = plan_of(m.PlanAnnouncement(number=1, tensors=tuple(tensors), cuts=tuple(cuts)), MODEL)
    except Refused:
        return
    assert sum(part.elements for part in plan.parts) == MODEL.elements
    assert through_the_wire(plan, MODEL) == plan
