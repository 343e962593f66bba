"""Payloads of a worker's gradients: the parts that its assignment names."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from gradwire.common.configuration import UsageError
from gradwire.common.parts import ALIGNMENT, divide
from gradwire.compressors import (
    DensePayload,
    LayerRule,
    ModelCompressor,
    NonFiniteGradient,
    Payload,
    PushTerms,
    Step,
    TensorSpec,
    decode,
    parse_compressor,
)
from gradwire.optim.steps import Sgd
from gradwire.planning import is_measured
from gradwire.proto.messages import Assignment
from gradwire.settings import JobTerms
from gradwire.worker.session.compression import Compression, compression_of

SPECS = [TensorSpec(name="w", shape=(100, 100)), TensorSpec(name="b", shape=(11,))]
PLAN = divide([spec.elements for spec in SPECS], 4 * ALIGNMENT)


def compression(spec: str) -> Compression:
    return Compression(ModelCompressor(SPECS, spec, LayerRule(), 1, 0, plan=PLAN))


def gradients(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(spec.shape, generator=generator) for spec in SPECS]


def begun(subject: Compression, given: Assignment, tensors: list[torch.Tensor], **changes: bool) -> Step:
    """A step with all of its gradients."""
    version, leaving = given.version, changes.get("leaving", False)
    step = subject.begin(given, PushTerms(samples=8, version=version), leaving=leaving)
    for place in reversed(range(len(tensors))):
        step.add(place, tensors[place])
    return step


def push(
    subject: Compression, version: int, slice: int = 0, slices: int = 0, *, leaving: bool = False
) -> dict[int, list[Payload]]:
    """Return the payloads of a push, by part."""
    given = Assignment(id=1, world=1, version=version, slice=slice, slices=slices)
    step = begun(subject, given, gradients(version), leaving=leaving)
    step.finish()
    return step.sent


def values(sent: dict[int, list[Payload]]) -> dict[int, bytes]:
    return {part: b"".join(decode(each).tobytes() for each in payloads) for part, payloads in sent.items()}


def test_the_plan_has_parts_enough_for_a_group() -> None:
    assert len(PLAN.parts) == 4
    assert all(PLAN.slice(number, 2) for number in range(2))


def test_members_of_a_group_skip_a_gradient_together() -> None:
    """Whichever part it is in that is not finite."""
    for slice, place in itertools.product((0, 1), ((0, 0), (99, 99))):
        bad = gradients(0)
        bad[0][place] = float("nan")
        given = Assignment(id=1, world=1, version=0, slice=slice, slices=2)
        with pytest.raises(NonFiniteGradient, match="'w'"):
            begun(compression("4bit"), given, bad)


@pytest.mark.parametrize("spec", ["bf16:clip=1,feedback=off", "4bit", "topk"])
def test_members_of_a_group_send_what_one_would_send_alone(spec: str) -> None:
    """Clipping, levels and selection go by the whole gradient."""
    whole = values(push(compression(spec), 0))
    halves = [values(push(compression(spec), 0, slice, 2)) for slice in (0, 1)]
    assert not halves[0].keys() & halves[1].keys()
    assert halves[0] | halves[1] == whole


def test_members_of_a_group_draw_numbers_of_their_own() -> None:
    """Members that push the same part draw apart, too."""
    turns = [(0, 0), (0, 2), (1, 2)]
    sent = [values(push(compression("qsgd:bits=2"), 0, *turn)) for turn in turns]
    assert all(sent[0][part] == found for part, found in sent[1].items())
    assert all(sent[0][part] != found for part, found in sent[2].items() if part)


def test_small_tensors_stay_dense() -> None:
    sent = push(compression("4bit"), 0)
    assert [type(payload).__name__ for part in sorted(sent) for payload in sent[part]] == [
        "DensePayload",
        *["QuantizedPayload"] * 3,
    ]


def test_a_worker_that_leaves_hands_over_what_it_holds_of_all_parts() -> None:
    """Also of those that are another worker's now, whose gradient is not its to send."""
    subject = compression("topk:ratio=8")
    push(subject, 0, 0, 2)
    push(subject, 1, 1, 2)
    held = subject.ledger.residual.clone()
    sent = push(subject, 2, 1, 2, leaving=True)
    assert sent.keys() == {*range(len(PLAN.parts))}
    assert all(isinstance(payload, DensePayload) for payloads in sent.values() for payload in payloads)
    assert subject.ledger.empty
    gradient = torch.cat([each.reshape(-1) for each in gradients(2)])
    for part, payloads in sent.items():
        bounds = slice(PLAN.parts[part].start, PLAN.parts[part].end)
        expected = held[bounds] + (gradient[bounds] if part in PLAN.slice(1, 2) else 0)
        np.testing.assert_array_equal(np.concatenate([*map(decode, payloads)]), expected.numpy())


@pytest.mark.parametrize(("stragglers", "slices"), [(0, 0), (1, 0), (0, 2)])
def test_only_a_push_that_others_may_make_superfluous_keeps_the_state_of_before_it(
    stragglers: int, slices: int
) -> None:
    given = Assignment(id=1, version=0, stragglers=stragglers, slices=slices)
    subject = compression("4bit")
    before = begun(subject, given, gradients(0)).finish(undoable=subject.undoable(given))
    assert (before is not None) == bool(stragglers or slices)


@pytest.mark.parametrize("leaving", [False, True])
def test_who_takes_a_lost_members_place_pushes_the_parts_that_are_left(leaving: bool) -> None:
    """The residual of the other parts stays, also when it leaves: they count already."""
    subject = compression("4bit")
    push(subject, 0)
    before = subject.ledger.residual.clone()
    given = Assignment(id=2, world=1, version=0, parts=(1, 3))
    step = begun(subject, given, gradients(1), leaving=leaving)
    step.finish()
    assert sorted(step.sent) == [1, 3]
    for part in (0, 2):
        here = slice(PLAN.parts[part].start, PLAN.parts[part].end)
        assert torch.equal(subject.ledger.residual[here], before[here])


def test_a_push_can_be_undone_where_somebody_else_may_have_to_compute_it() -> None:
    model = ModelCompressor(SPECS, "4bit", LayerRule(), 1, 0, plan=PLAN)
    plain = Assignment(id=1, world=1, version=0)
    assert [Compression(model, in_parts=each).undoable(plain) for each in (False, True)] == [False, True]


@pytest.mark.parametrize(
    ("auto", "compressor", "words"),
    [
        (True, "4bit", "--compressor auto: not with --mode local:fragments=2"),
        (False, "1bit:delay=2", "--compressor 1bit:delay=2: not with .*would skip the turns"),
    ],
)
def test_pushes_of_a_fragment_refuse_what_counts_rounds_or_bytes(
    auto: bool, compressor: str, words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        compression_of(
            parse_compressor(compressor),
            auto=auto,
            optimizer=Sgd(),
            local=True,
            specs=SPECS,
            rule=LayerRule(),
            terms=JobTerms(id="1", work="local"),
            rank=0,
            fragments=2,
        )


@pytest.mark.parametrize(("fusion", "measures"), [("seamgs", True), ("mgwfbp", False), ("bytes", False)])
def test_gradients_leave_alone_where_the_server_measures_their_norms(fusion: str, measures: bool) -> None:
    """The version of the assignment decides, whatever number seeds the draw."""
    terms = JobTerms(id="1", work="gradients", fusion=fusion)
    subject = compression_of(
        parse_compressor("randk:ratio=4,values=float32"),
        auto=False,
        optimizer=Sgd(),
        local=False,
        specs=SPECS,
        rule=LayerRule(),
        terms=terms,
        rank=0,
    )
    alone: list[int] = []
    for version in range(60):
        tensors = gradients(version)
        given = Assignment(id=1, world=1, version=version)
        step = subject.begin(given, PushTerms(samples=8, version=version + 7, step=version), leaving=False)
        for place in (1, 0):
            step.add(place, tensors[place])
        step.finish()
        (payloads,) = step.sent.values()
        sent = decode(payloads[0])
        places = np.flatnonzero(sent)
        if np.array_equal(sent[places], tensors[0].numpy().reshape(-1)[places]):
            alone.append(version)
    # Before the first step there is no residual that could be sent too.
    assert alone == [version for version in range(60) if version == 0 or (measures and is_measured(version))]
