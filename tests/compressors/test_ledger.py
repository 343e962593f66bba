"""The residual ledger: everything sent + residual == everything computed, however a push is settled."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt
import pytest
import torch
from flat import as_push

from gradwire.common.parts import Part, Plan, Unit
from gradwire.compressors import (
    Compressed,
    LayerRule,
    ModelCompressor,
    Payload,
    PushTerms,
    Step,
    TensorSpec,
    decode,
)
from gradwire.compressors.feedback import ErrorFeedback
from gradwire.compressors.ledger import Ledger
from gradwire.compressors.registry import BUILT_IN, create

SPECS = [
    TensorSpec(name="w", shape=(9, 11)),
    TensorSpec(name="b", shape=(11,)),
    TensorSpec(name="tiny", shape=(1, 2)),
    TensorSpec(name="scale", shape=()),
]
ELEMENTS = sum(spec.elements for spec in SPECS)
WITH_FEEDBACK = sorted(
    name for name in BUILT_IN if isinstance(create(name), ErrorFeedback) and name not in ("dgc", "krngc")
)
MOMENTUM = ["dgc:ratio=8", "krngc:ratio=8", "topk:ratio=8,momentum=0.9", "4bit:momentum=0.5,decay=0.5"]


# The weight in three parts, of which the last holds all that is small; and no part has its border at a word.
PLAN = Plan(
    parts=(Part(99, 113), Part(0, 33), Part(33, 70), Part(70, 99)),
    units=(Unit(1, 4, range(1), 99, 113), Unit(0, 1, range(1, 4), 0, 99)),
    starts=(0, 99, 110, 112, 113),
)


class Subject:
    """A compressor whose pushes are added up as a server would, in the measure of whole tensors."""

    def __init__(self, spec: str) -> None:
        self.compressor = ModelCompressor(SPECS, spec, LayerRule(), seed=1, rank=0, plan=PLAN)
        self.ledger = self.compressor.ledger
        self.versions = itertools.count()
        self.wanted: frozenset[int] | None = None

    def divide(self, slice: int, slices: int) -> None:
        self.wanted = PLAN.slice(slice, slices) if slices > 1 else None
        self.compressor.set_slices(slices)

    def begun(self, version: int, *, flush: bool = False) -> Step:
        """A step with all of its gradients."""
        step = self.compressor.begin(PushTerms(samples=8, version=version, wanted=self.wanted, flush=flush))
        for place, gradient in enumerate(gradients(version)):
            step.add(place, gradient)
        return step

    def step(self, version: int, *, undoable: bool = False, flush: bool = False) -> Compressed:
        step = self.begun(version, flush=flush)
        before = step.finish(undoable=undoable)
        payloads: list[Payload] = []
        ranges: list[tuple[int, int]] = []
        for number, part in step.sent.items():
            ends = accumulate((each.elements for each in part), initial=PLAN.parts[number].start)
            payloads += part
            ranges += pairwise(ends)
        return Compressed(payloads, ranges, self.ledger.slices, before)

    def computed(self, version: int) -> npt.NDArray[np.float32]:
        """The gradient as far as it is this worker's slice."""
        out = np.zeros(ELEMENTS, np.float32)
        flat = torch.cat([each.reshape(-1) for each in gradients(version)]).numpy()
        for start, end in self.bounds():
            out[start:end] = flat[start:end] * self.ledger.slices
        return out

    def bounds(self) -> list[tuple[int, int]]:
        """Bounds of the parts of its slice."""
        wanted = range(len(PLAN.parts)) if self.wanted is None else self.wanted
        return [(PLAN.parts[part].start, PLAN.parts[part].end) for part in wanted]

    def owed(self) -> npt.NDArray[np.float32]:
        return self.ledger.residual.numpy() * np.float32(self.ledger.slices)


def gradients(version: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return [torch.randn(spec.shape, generator=generator) for spec in SPECS]


def delivered(sent: Compressed) -> npt.NDArray[np.float32]:
    out = np.zeros(ELEMENTS, np.float32)
    for payload, (start, end) in zip(sent.payloads, sent.ranges, strict=False):
        out[start:end] = decode(payload) * np.float32(sent.slices)
    return out


def state(subject: Subject) -> list[object]:
    """All of it, to the bit."""
    velocity = subject.ledger.velocity
    return [
        subject.ledger.residual.numpy().tobytes(),
        None if velocity is None else velocity.numpy().tobytes(),
        list(subject.ledger.states),
    ]


@pytest.mark.parametrize("spec", [*WITH_FEEDBACK, *MOMENTUM, "none", "qsgd", "signsgd"])
@pytest.mark.parametrize("slices", [1, 3])
def test_a_push_that_was_not_needed_leaves_the_exact_state_of_before_it(spec: str, slices: int) -> None:
    subject = Subject(spec)
    subject.divide(0, slices)
    for version in range(3):
        subject.step(version, undoable=True)
    expected = state(subject)
    subject.ledger.forget(subject.step(3, undoable=True))
    assert state(subject) == expected


@pytest.mark.parametrize("spec", [*WITH_FEEDBACK, "none"])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_open_pushes_are_settled_in_any_order(spec: str, order: Sequence[int]) -> None:
    """One is accepted, one is stale, one superfluous, while a fourth is open."""
    subject = Subject(spec)
    subject.step(9)
    start = subject.owed()
    pushes = [subject.step(version, undoable=True) for version in range(4)]
    for number in order:
        if number == 1:
            subject.ledger.put_back(pushes[1])
        elif number == 2:
            subject.ledger.forget(pushes[2])
    owed = start + subject.computed(0) + subject.computed(1) + subject.computed(3)
    total = delivered(pushes[0]) + delivered(pushes[3]) + subject.owed()
    if subject.compressor.ledger.empty:
        assert spec == "none"
    np.testing.assert_allclose(total, owed, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("spec", WITH_FEEDBACK)
def test_nothing_is_lost_when_slices_change(spec: str) -> None:
    """The residual of a range that is another worker's now waits for it, or for the flush."""
    subject = Subject(spec)
    turns = [(0, 2), (0, 2), (1, 2), (0, 1), (2, 3), (2, 3), (0, 4), (3, 4), (0, 1), (1, 2)]
    total, expected = np.zeros(ELEMENTS, np.float32), np.zeros(ELEMENTS, np.float32)
    for version, (slice, slices) in enumerate(turns):
        subject.divide(slice, slices)
        total += delivered(subject.step(version))
        expected += subject.computed(version)
    np.testing.assert_allclose(total + subject.owed(), expected, atol=2e-4)
    total += delivered(subject.step(99, flush=True))
    expected += subject.computed(99)
    np.testing.assert_allclose(total, expected, atol=2e-4)
    assert subject.ledger.empty


@pytest.mark.parametrize("spec", [*WITH_FEEDBACK, *MOMENTUM])
def test_what_a_worker_holds_of_another_slice_waits_for_it(spec: str) -> None:
    """To the bit, and then it goes out."""
    subject = Subject(spec)
    subject.divide(0, 2)
    subject.step(0)
    held, before = subject.owed(), subject.bounds()
    subject.divide(1, 2)
    for version in range(1, 40):
        subject.step(version)
    for start, end in before:
        np.testing.assert_array_equal(subject.owed()[start:end], held[start:end])
    if spec in MOMENTUM:
        return
    subject.divide(0, 2)
    sent = delivered(subject.step(50))
    total = held + subject.computed(50)
    for start, end in before:
        np.testing.assert_allclose(sent[start:end] + subject.owed()[start:end], total[start:end], atol=1e-5)


@pytest.mark.parametrize("then", [(0, 2), (1, 2), (0, 1), (2, 3)])
@pytest.mark.parametrize("spec", ["topk:ratio=8", "none", "qsgd"])
def test_a_refused_push_of_a_slice_is_owed_whatever_the_slice_is_then(
    spec: str, then: tuple[int, int]
) -> None:
    subject = Subject(spec)
    subject.divide(0, 2)
    refused = subject.step(0)
    held = subject.owed()
    subject.divide(*then)
    subject.ledger.put_back(refused)
    np.testing.assert_allclose(subject.owed(), held + delivered(refused), rtol=1e-5, atol=1e-5)
    subject.divide(0, 2)
    later = subject.step(1)
    if spec != "qsgd":  # what it loses, it loses
        np.testing.assert_allclose(
            delivered(later) + subject.owed(), held + delivered(refused) + subject.computed(1), atol=1e-4
        )


@pytest.mark.parametrize("spec", sorted(BUILT_IN))
def test_slices_of_every_compressor_are_payloads_of_that_size(spec: str) -> None:
    for slices in (2, 3, 16):
        for slice in (0, slices - 1):
            subject = Subject(spec)
            subject.divide(slice, slices)
            for version in range(3):
                sent = subject.step(version)
                if not sent.payloads:
                    assert spec == "krngc" or not subject.bounds()
                    continue
                covered = sorted(place for start, end in sent.ranges for place in range(start, end))
                assert covered == sorted(place for bound in subject.bounds() for place in range(*bound))
                assert all(np.isfinite(decode(payload)).all() for payload in sent.payloads)


@pytest.mark.parametrize("spec", [*WITH_FEEDBACK, *MOMENTUM, "none", "qsgd"])
def test_a_group_sends_what_one_would_send_alone(spec: str) -> None:
    """Members compress alike and send different parts; who leaves adds no gradient of the others' parts."""
    whole = Subject(spec)
    sent = delivered(whole.step(0))
    for flush in (False, True):
        total = np.zeros(ELEMENTS, np.float32)
        for slice in range(4):
            member = Subject(spec)
            member.divide(slice, 4)
            total += delivered(member.step(0, flush=flush)) / 4
        flat = torch.cat([each.reshape(-1) for each in gradients(0)]).numpy()
        np.testing.assert_array_equal(total, flat if flush else sent)


def test_a_compressor_without_feedback_takes_no_memory_until_something_is_owed() -> None:
    subject = Subject("none")
    sent = subject.step(0)
    assert subject.ledger._residual is None  # pyright: ignore[reportPrivateUsage]
    subject.ledger.put_back(sent)
    assert not subject.ledger.empty


def test_the_largest_values_saturate_instead_of_overflowing() -> None:
    subject = Subject("none")
    largest = [torch.full(spec.shape, 3.4e38) for spec in SPECS]
    for _ in range(3):
        payloads = subject.compressor.compress(largest, 1, version=0)
        subject.ledger.put_back(as_push(payloads))
        subject.ledger.put_back(as_push(payloads))
    assert torch.isfinite(subject.ledger.residual).all()


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("spec", [*WITH_FEEDBACK, "none"])
def test_what_others_sent_of_a_push_is_forgotten_and_what_counts_of_it_stays_sent(
    spec: str, later: bool
) -> None:
    subject = Subject(spec)
    subject.step(0)
    before = subject.owed().copy()
    sent = subject.step(1, undoable=True)
    counts = np.zeros(ELEMENTS, bool)
    counts[33:70] = True
    expected = np.where(counts, subject.owed(), before)
    if later:
        held = subject.owed().copy()
        other = subject.step(2, undoable=True)
        expected += subject.owed() - held
        subject.ledger.keep(other)
    subject.ledger.forget(sent, [(33, 70)])
    np.testing.assert_allclose(subject.owed(), expected, rtol=1e-5, atol=1e-5)


def test_a_push_that_counts_leaves_its_buffer_to_the_next_step() -> None:
    """Else each step would allocate one as large as the model, and work out what it has changed."""
    subject = Subject("4bit")
    buffers: set[int] = set()
    for version in range(4):
        sent = subject.step(version, undoable=True)
        buffers.add(subject.ledger.residual.data_ptr())
        subject.ledger.keep(sent)
    assert len(buffers) == 2


def test_reserved_memory_becomes_the_residual_and_the_draft() -> None:
    subject = Ledger([2, 3])
    subject.reserve()
    draft = subject.draft.data_ptr()
    assert subject.unused
    assert subject.residual.tolist() == [0.0] * 5
    assert (subject.draft.data_ptr(), subject.draft.tolist()) == (draft, [0.0] * 5)
