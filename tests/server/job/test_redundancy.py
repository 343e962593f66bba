"""Slices and codes at the server: sums, divisions, headers that are refused, options that go together."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from pushes import pushed

from gradwire.compressors import DenseFormat, DensePayload, Payload
from gradwire.configuration import UsageError
from gradwire.proto.manifest import Manifest
from gradwire.proto.messages import Assignment, Push, Range, Tensor
from gradwire.proto.refusal import Reason, Refused
from gradwire.proto.shares import share
from gradwire.proto.transfer import tensor_header
from gradwire.server.checks import check
from gradwire.server.job.modes.division import Sliced, StragglerCoded, divide, largest_divisor
from gradwire.server.job.modes.registry import parse
from gradwire.server.job.modes.sync import SyncOptions
from gradwire.server.job.samples import Samples
from gradwire.server.shard.inbox import Inbox
from gradwire.server.shard.mean import mean
from gradwire.settings import ServerSettings
from gradwire.spec import SpecError

SHAPES = ((5, 3), (2,), ())
MANIFEST = Manifest(
    tuple(Tensor(name=f"t{i}", shape=shape, dtype="float32") for i, shape in enumerate(SHAPES)), 100
)


def dense(values: np.ndarray[Any, Any]) -> Payload:
    data = np.ascontiguousarray(values, np.float32).view(np.uint8)
    return DensePayload(format=DenseFormat.FLOAT32, elements=values.size, data=data)


def gradients(seed: int) -> list[np.ndarray[Any, Any]]:
    generator = np.random.default_rng(seed)
    return [generator.standard_normal(spec.elements).astype(np.float32) for spec in MANIFEST.specs]


def cut(whole: list[np.ndarray[Any, Any]], slice: int, slices: int) -> list[Payload]:
    bounds = [share(each.size, slice, slices) for each in whole]
    return [dense(each[start:end]) for each, (start, end) in zip(whole, bounds, strict=True)]


def outs() -> list[np.ndarray[Any, Any]]:
    return [np.full(spec.elements, 7, np.float32) for spec in MANIFEST.specs]


# ---- sums


@pytest.mark.parametrize("slices", [2, 3, 4])
def test_slices_come_to_the_mean_of_the_groups(slices: int) -> None:
    shares = [
        pushed(samples, cut(gradients(group), slice, slices), slice=slice, slices=slices)
        for group, samples in enumerate((8, 8, 4))
        for slice in range(slices)
    ]
    found = outs()
    mean(shares, 1.0, found)
    for place, out in enumerate(found):
        expected = sum(n / 20 * gradients(group)[place] for group, n in enumerate((8, 8, 4)))
        np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-6)


def test_a_slice_that_is_missing_is_missing_in_its_range_alone() -> None:
    shares = [
        pushed(8, cut(gradients(0), 0, 2), slice=0, slices=2),
        pushed(8, cut(gradients(0), 1, 2), slice=1, slices=2),
        pushed(8, cut(gradients(1), 0, 2), slice=0, slices=2),
    ]
    found = outs()
    mean(shares, 1.0, found)
    for place, out in enumerate(found):
        one, other = gradients(0)[place], gradients(1)[place]
        _, end = share(out.size, 0, 2)
        np.testing.assert_allclose(out[:end], (one + other)[:end] / 2, rtol=1e-6)
        np.testing.assert_allclose(out[end:], one[end:], rtol=1e-6)
    found = outs()
    mean(shares[:1], 1.0, found)
    assert not found[0][8:].any(), "nobody has pushed it"


def test_what_comes_along_outside_of_a_slice_is_added_with_its_weight() -> None:
    whole = [dense(each) for each in gradients(1)]
    shares = [
        pushed(8, cut(gradients(0), 0, 2), slice=0, slices=2),
        pushed(8, cut(gradients(0), 1, 2), slice=1, slices=2),
        pushed(8, whole, slice=0, slices=2, whole=True),
        pushed(8, cut(gradients(2), 1, 2), slice=1, slices=2),
    ]
    found = outs()
    mean(shares, 1.0, found)
    first, along, second = gradients(0)[0], gradients(1)[0], gradients(2)[0]
    np.testing.assert_allclose(found[0][:8], (first + along)[:8] / 2, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(found[0][8:], (first + along + second)[8:] / 2, rtol=1e-6, atol=1e-7)


# ---- how a round is divided


def test_groups_are_as_large_as_the_members_allow() -> None:
    assert [largest_divisor(n, 4) for n in (1, 2, 3, 4, 5, 6, 8, 9)] == [1, 2, 3, 4, 1, 3, 4, 3]
    division = divide(SyncOptions(redundancy=4), Samples(100, 2), 4, 6, 0)
    assert isinstance(division, Sliced)
    assert [part.slice for part in division.parts] == [0, 1, 2, 0, 1, 2]
    assert [part.position for part in division.parts] == [0, 0, 0, 1, 1, 1]
    assert {part.samples for part in division.parts} == {12}
    assert division.note == "redundancy=4: a round of 6 members is divided in groups of 3"


def test_an_epoch_that_ends_may_leave_groups_without_samples() -> None:
    division = divide(SyncOptions(redundancy=2), Samples(1, 1), 4, 4, 0)
    assert isinstance(division, Sliced)
    assert len(division.parts) == 2


@pytest.mark.parametrize(("late", "stragglers"), [(0, 2), (1, 1), (2, 0), (3, 0)])
def test_who_is_late_counts_among_those_that_a_code_does_without(late: int, stragglers: int) -> None:
    division = divide(SyncOptions(stragglers=2), Samples(100, 2), 4, 5, late)
    assert division is not None
    assert isinstance(division, StragglerCoded) == (stragglers > 0)
    assert {part.stragglers for part in division.parts} == {stragglers}
    assert division.needed == 5 - stragglers


# ---- headers


ASSIGNED = Assignment(id=3, world=1, version=0, ranges=(Range(start=0, count=8),), slice=1, slices=2)


def push(slice: int, slices: int, payloads: list[Payload], **changes: Any) -> Push:
    fields: dict[str, Any] = {
        "seq": 1,
        "assignment": 3,
        "base_version": 0,
        "samples": 8,
        "tensors": tuple(tensor_header(i, payload) for i, payload in enumerate(payloads)),
        "slice": slice,
        "slices": slices,
    }
    return Push(**{**fields, **changes})


def test_a_slice_is_taken_as_it_was_assigned_and_whole_tensors_too() -> None:
    inbox = Inbox("w")
    inbox.begin(push(1, 2, cut(gradients(0), 1, 2)), MANIFEST, ASSIGNED)
    assert inbox.current is not None
    inbox.begin(push(0, 0, [dense(each) for each in gradients(0)]), MANIFEST, ASSIGNED)
    assert inbox.current is not None


@pytest.mark.parametrize(
    ("header", "reason", "text"),
    [
        (push(0, 2, cut(gradients(0), 0, 2)), Reason.TENSOR, "slice 1 of 2"),
        (push(1, 3, cut(gradients(0), 1, 3)), Reason.TENSOR, "slice 1 of 2"),
        (push(2, 2, cut(gradients(0), 1, 2)), Reason.TENSOR, "slice 1 of 2"),
        (push(5, 4, cut(gradients(0), 1, 2), assignment=1), Reason.TENSOR, "a slice below slices"),
        (push(1, 2, cut(gradients(0), 0, 2)), Reason.ELEMENTS, "7 elements"),
        (push(1, 2, [dense(each) for each in gradients(0)]), Reason.ELEMENTS, "7 elements"),
        (push(0, 0, cut(gradients(0), 0, 2)), Reason.ELEMENTS, "15 elements"),
    ],
)
def test_a_slice_that_was_not_asked_for_is_refused_before_memory_is_taken(
    header: Push, reason: Reason, text: str
) -> None:
    inbox = Inbox("w")
    with pytest.raises(Refused, match=text) as caught:
        inbox.begin(header, MANIFEST, ASSIGNED)
    assert caught.value.refusal.reason is reason
    assert caught.value.refusal.worker == "w"
    assert inbox.current is None
    assert inbox.take() is None


# ---- options


@pytest.mark.parametrize(
    ("mode", "changes", "why"),
    [
        ("sync:redundancy=2", {"aggregation": "median"}, "--aggregation median: not with --mode sync:red"),
        ("sync:stragglers=2", {"min_workers": 2}, "--min-workers 2: --mode sync:stragglers=2 .*at least 3"),
        ("sync:backup=1", {"min_workers": 1}, "--min-workers 1: --mode sync:backup=1 .*at least 2"),
    ],
)
def test_options_that_do_not_go_together(mode: str, changes: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        check(dataclasses.replace(ServerSettings(mode=mode), **changes))


@pytest.mark.parametrize(
    ("mode", "why"),
    [
        ("sync:redundancy=auto", "redundancy: expected a whole number, got 'auto'"),
        ("sync:redundancy=0", "redundancy: expected 1 to 4294967295, got '0'"),
        ("async:redundancy=2", "mode 'async': unknown key 'redundancy'"),
        ("local:stragglers=1", "mode 'local': unknown key 'stragglers'"),
        ("sync:redundancy=2,backup=1", "redundancy=2: not with backup=1"),
        ("sync:stragglers=1,backup=1", "stragglers=1: not with backup=1"),
        ("sync:stragglers=1,redundancy=2", "stragglers=1: not with redundancy=2"),
        ("coded:redundancy=x", "expected a whole number from 1, or auto, got 'x'"),
        ("coded:redundancy=1.5", "expected a whole number from 1, or auto"),
    ],
)
def test_modes_that_cannot_be(mode: str, why: str) -> None:
    with pytest.raises(SpecError, match=why):
        parse(mode)


@pytest.mark.parametrize(("mode", "workers"), [("sync:redundancy=2", 1), ("sync:stragglers=2", 3)])
def test_options_that_do(mode: str, workers: int) -> None:
    check(ServerSettings(mode=mode, min_workers=workers))
