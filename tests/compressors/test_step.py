"""A step of a whole model, part by part: in any order, with gradients missing, and undone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from flat import as_push

from gradwire.common.parts import ALIGNMENT, divide
from gradwire.compressors import (
    AbsentPayload,
    LayerRule,
    ModelCompressor,
    NonFiniteGradient,
    PushTerms,
    SparsePayload,
    Step,
    TensorSpec,
    decode,
    registry,
    validate,
)

LARGE = [
    TensorSpec(name="first", shape=(40, 320)),
    TensorSpec(name="bias", shape=(40,)),
    TensorSpec(name="nothing", shape=(0, 3)),
    TensorSpec(name="second", shape=(5, 1024)),
    TensorSpec(name="last", shape=(31, 100)),
]
CUT = divide([spec.elements for spec in LARGE], 4 * ALIGNMENT)
# `lowrank` sends no tensor in several parts, as `CUT` has them.
EVERY = [
    *sorted({*registry.BUILT_IN} - {"lowrank"}),
    "topk:momentum=0.9,clip=1",
    "krngc:feedback=off",
    "4bit:delay=2",
]


def large(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(spec.shape, generator=generator) * 0.01 for spec in LARGE]


def compressor_of(spec: str, part_bytes: int = 4 * ALIGNMENT) -> ModelCompressor:
    plan = divide([spec.elements for spec in LARGE], part_bytes)
    return ModelCompressor(LARGE, spec, LayerRule(), seed=1, rank=0, plan=plan)


def kept(subject: ModelCompressor) -> list[object]:
    """All of what it remembers, to the bit."""
    velocity = subject.ledger.velocity
    return [
        subject.ledger.residual.numpy().tobytes(),
        None if velocity is None else velocity.numpy().tobytes(),
        repr(subject.ledger.states),
    ]


def test_a_part_is_there_as_soon_as_its_last_gradient_is() -> None:
    tensors = [range(unit.first, unit.last) for unit in CUT.units]
    assert tensors == [range(4, 5), range(3, 4), range(1, 3), range(1)]
    given, step = large(0), compressor_of("4bit").begin(PushTerms(samples=8, version=0))
    ready = [[*step.add(place, given[place])] for place in (4, 2, 0, 1, 3)]
    assert ready == [[0], [], [4, 5, 6, 7], [3], [1, 2]]
    for part, payloads in step.sent.items():
        assert sum(payload.elements for payload in payloads) == CUT.parts[part].elements


@pytest.mark.parametrize("spec", ["topk:clip=1", "krngc"])
def test_what_needs_all_gradients_sends_every_part_with_the_last_one(spec: str) -> None:
    given, step = large(0), compressor_of(spec).begin(PushTerms(samples=8, version=0))
    counts = [len(step.add(place, given[place])) for place in (4, 2, 0, 1, 3)]
    assert counts == [0, 0, 0, 0, len(CUT.parts)]


@pytest.mark.parametrize("spec", EVERY)
def test_a_step_that_is_not_committed_changes_nothing(spec: str) -> None:
    """Wherever it stops: in its middle, at a gradient that is not finite, or at its end."""
    subject, calm = compressor_of(spec), compressor_of(spec)
    for version in range(2):
        for each in (subject, calm):
            each.compress(large(version), 8, version=version)
    before = kept(subject)
    given = large(77)
    for stop in range(1, len(LARGE) + 1):
        step = subject.begin(PushTerms(samples=8, version=stop))
        for place in reversed(range(len(LARGE) - stop, len(LARGE))):
            step.add(place, given[place])
        assert kept(subject) == before
    given[0][0, 0] = float("nan")
    step = subject.begin(PushTerms(samples=8, version=9))
    step.add(4, given[4])
    with pytest.raises(NonFiniteGradient, match="'first'"):
        step.add(0, given[0])
    assert kept(subject) == before
    sent = [each.compress(large(2), 8, version=2) for each in (subject, calm)]
    assert [p.data.tobytes() for p in sent[0]] == [p.data.tobytes() for p in sent[1]]
    assert kept(subject) == kept(calm)


@pytest.mark.parametrize("spec", ["4bit", "topk", "dgc", "none", "qsgd"])
def test_parts_that_are_not_wanted_leave_the_rest_of_the_ledger(spec: str) -> None:
    """A part that is wanted is what it is among all of them, also where its tensor is cut."""
    subject, whole = compressor_of(spec), compressor_of(spec)
    for each in (subject, whole):
        each.ledger.put_back(as_push(each.compress(large(0), 8, version=0)))
    before, wanted = subject.ledger.residual.clone(), frozenset({0, 2, 5})
    steps = (
        subject.begin(PushTerms(samples=8, version=1, wanted=wanted)),
        whole.begin(PushTerms(samples=8, version=1)),
    )
    for step in steps:
        for place in reversed(range(len(LARGE))):
            step.add(place, large(1)[place])
        step.finish()
    assert steps[0].sent.keys() == wanted
    for part, bounds in enumerate(CUT.parts):
        owed, alone = (each.ledger.residual[bounds.start : bounds.end] for each in (subject, whole))
        assert torch.equal(owed, alone if part in wanted else before[bounds.start : bounds.end])
        if part in wanted:
            ours, theirs = ([decode(each).tobytes() for each in step.sent[part]] for step in steps)
            assert ours == theirs


# gradients that do not exist


def pushed(step: Step) -> dict[int, bytes]:
    """Return the decoded bytes of each part of a step."""
    return {part: b"".join(decode(each).tobytes() for each in sent) for part, sent in step.sent.items()}


def absent_elements(step: Step) -> set[int]:
    """In flat order, of which nothing is sent."""
    found: set[int] = set()
    for part, sent in step.sent.items():
        at = step.plan.parts[part].start
        for payload in sent:
            if isinstance(payload, AbsentPayload):
                found |= {*range(at, at + payload.elements)}
                assert payload.data.size == 0
            at += payload.elements
    return found


def elements_of(places: Sequence[int]) -> set[int]:
    return {element for place in places for element in range(CUT.starts[place], CUT.starts[place + 1])}


def a_step(subject: ModelCompressor, seed: int, absent: Sequence[int], **step: Any) -> Step:
    given = large(seed)
    begun = subject.begin(PushTerms(samples=8, version=seed, workers=2, **step))
    for place in reversed(range(len(LARGE))):
        begun.add(place, None if place in absent else given[place])
    begun.finish()
    return begun


@pytest.mark.parametrize("part_bytes", [4 * ALIGNMENT, 1 << 30])
@pytest.mark.parametrize("absent", [(0,), (1,), (3, 4), (0, 1, 2, 3, 4)])
@pytest.mark.parametrize("spec", EVERY)
def test_of_a_gradient_that_does_not_exist_nothing_is_sent_and_nothing_changes(
    spec: str, absent: tuple[int, ...], part_bytes: int
) -> None:
    """At the first step, and once there is something that a step could change."""
    subject = compressor_of(spec, part_bytes)
    for version in range(5):
        missing = absent if version in (0, 3) else ()
        ledger = subject.ledger
        before, states = ledger.residual.clone(), list(ledger.states)
        velocity = None if ledger.velocity is None else ledger.velocity.clone()
        step = a_step(subject, version, missing)
        for payload in (payload for sent in step.sent.values() for payload in sent):
            assert payload.elements
            validate(payload)
        for part, sent in step.sent.items():
            assert sum(payload.elements for payload in sent) == step.plan.parts[part].elements
        if step.sends:
            assert absent_elements(step) == elements_of(missing)
        for place in missing:
            here = slice(*CUT.starts[place : place + 2])
            assert torch.equal(ledger.residual[here], before[here])
            assert ledger.states[place] is states[place]
            if velocity is not None:
                assert ledger.velocity is not None
                assert torch.equal(ledger.velocity[here], velocity[here])


@pytest.mark.parametrize("spec", [spec for spec in EVERY if "krngc" not in spec and "clip" not in spec])
def test_the_bits_of_the_others_do_not_depend_on_it(spec: str) -> None:
    """Neighbours that are compressed together, and those that are not."""
    subject, whole = compressor_of(spec, 1 << 30), compressor_of(spec, 1 << 30)
    for version in range(4):
        ours, theirs = a_step(subject, version, (1, 3)), a_step(whole, version, ())
        if not ours.sends:
            continue
        values, expected = (np.frombuffer(pushed(step)[0], np.float32) for step in (ours, theirs))
        for place in (0, 2, 4):
            here = slice(*CUT.starts[place : place + 2])
            assert values[here].tobytes() == expected[here].tobytes()
            assert torch.equal(subject.ledger.residual[here], whole.ledger.residual[here])


@pytest.mark.parametrize("spec", EVERY)
def test_the_bits_depend_neither_on_the_plan_nor_on_the_order_in_which_it_is_missing(spec: str) -> None:
    results: list[list[object]] = []
    for part_bytes, order in [(1 << 30, "01234"), (4 * ALIGNMENT, "43210"), (16 * ALIGNMENT, "31402")]:
        subject, seen = compressor_of(spec, part_bytes), list[object]()
        for version in range(6):
            given, absent = large(version), [place for place in range(5) if (version >> place % 3) % 2]
            step = subject.begin(PushTerms(samples=8, version=version, workers=2, flush=version == 5))
            for place in map(int, order):
                step.add(place, None if place in absent else given[place])
            step.finish()
            in_order = sorted(step.sent, key=lambda part: subject.plan.parts[part].start)
            payloads = [payload for part in in_order for payload in step.sent[part]]
            seen += [np.concatenate([decode(each) for each in payloads]).tobytes()] if payloads else []
            seen.append(absent_elements(step))
            if version == 3:
                subject.ledger.put_back(as_push(payloads))
            seen += kept(subject)
        results.append(seen)
    assert all(result == results[0] for result in results[1:])


def test_what_is_owed_waits_for_a_gradient() -> None:
    """Also where the compressor keeps nothing, and a push has been put back."""
    subject = compressor_of("none")
    subject.ledger.put_back(as_push(subject.compress(large(0), 8, version=0)))
    step = a_step(subject, 1, (0, 2))
    for place in range(5):
        owed = subject.ledger.residual[slice(*CUT.starts[place : place + 2])]
        assert torch.equal(owed, large(0)[place].reshape(-1) if place in (0, 2) else torch.zeros_like(owed))
    assert absent_elements(step) == elements_of((0, 2))
    subject.ledger.put_back(as_push([payload for sent in step.sent.values() for payload in sent][:0]))
    step = a_step(subject, 2, ())
    flat = torch.cat([each.reshape(-1) for each in large(2)])
    for part, sent in pushed(step).items():
        bounds = CUT.parts[part]
        expected = flat[bounds.start : bounds.end].clone()
        for place in (0, 2):
            first, last = CUT.starts[place : place + 2]
            start, end = max(first, bounds.start), min(last, bounds.end)
            if start < end:
                expected[start - bounds.start : end - bounds.start] += large(0)[place].reshape(-1)[
                    start - first : end - first
                ]
        assert sent == expected.numpy().tobytes()


@pytest.mark.parametrize("spec", ["none", "4bit", "topk"])
@pytest.mark.parametrize("part_bytes", [4 * ALIGNMENT, 1 << 30])
def test_a_flush_sends_what_is_owed_and_nothing_of_what_is_not(spec: str, part_bytes: int) -> None:
    subject = compressor_of(spec, part_bytes)
    a_step(subject, 0, (0, 1))
    owed = subject.ledger.residual.clone()
    step = a_step(subject, 1, (0, 3), flush=True)
    missing = (0, 3) if spec == "none" else (0,)  # of the fourth tensor the others owe something
    assert absent_elements(step) == elements_of(missing)
    assert subject.ledger.empty
    flat = owed + torch.cat([each.reshape(-1) * (place not in (0, 3)) for place, each in enumerate(large(1))])
    for part, sent in pushed(step).items():
        bounds = step.plan.parts[part]
        np.testing.assert_array_equal(np.frombuffer(sent, np.float32), flat[bounds.start : bounds.end])


def test_a_flush_sends_all_of_a_tensor_of_which_something_is_owed() -> None:
    """The tensor is like an embedding, of which few rows have a gradient: the cuts have no say in what is
    absent."""
    found: list[set[int]] = []
    for part_bytes in (4 * ALIGNMENT, 1 << 30):
        subject = compressor_of("topk:ratio=10", part_bytes)
        given = [torch.zeros_like(each) for each in large(0)]
        for each in given:
            each.view(-1)[: each.numel() // 9] = 1.0
        step = subject.begin(PushTerms(samples=8, version=0, workers=2))
        for place, each in enumerate(given):
            step.add(place, each)
        step.finish()
        found.append(absent_elements(a_step(subject, 1, range(5), flush=True)))
    assert found[0] == found[1]


def test_a_flush_of_a_slice_says_nothing_of_other_parts() -> None:
    """Their gradients are those of other members of the group."""
    step = a_step(compressor_of("none"), 0, (), flush=True, wanted=frozenset({1, 5}))
    parts = [CUT.parts[part] for part in range(len(CUT.parts)) if part not in (1, 5)]
    assert absent_elements(step) == {each for part in parts for each in range(part.start, part.end)}


def test_clipping_and_plans_for_the_model_go_by_what_there_is() -> None:
    """The result is that of a model without the other tensors."""
    for spec, payload_bits in [("topk:clip=1e-3,feedback=off", True), ("krngc:feedback=off", False)]:
        step = a_step(compressor_of(spec, 1 << 30), 0, (0, 1))
        rest = ModelCompressor(LARGE[2:], spec, LayerRule(), seed=1, rank=0)
        expected = rest.compress(large(0)[2:], 8, version=0, workers=2)
        sent = [payload for payload in step.sent[0] if not isinstance(payload, AbsentPayload)]
        if payload_bits:
            assert [each.data.tobytes() for each in sent] == [each.data.tobytes() for each in expected]
        assert [each.count for each in sent if isinstance(each, SparsePayload)] == [
            each.count for each in expected if isinstance(each, SparsePayload)
        ]
