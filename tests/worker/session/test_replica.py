"""The replica: one buffer in which each part has a version of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from itertools import permutations

import numpy as np
import pytest
import torch
from scripted import updates
from torch import nn

from gradwire.common.parts import ALIGNMENT
from gradwire.compressors import AbsentPayload, DenseFormat, DensePayload
from gradwire.proto import messages as m
from gradwire.proto.manifest import Manifest, first_difference
from gradwire.proto.transfer import payload_header
from gradwire.worker.session.groups import ParameterGroups
from gradwire.worker.session.receiving import Received
from gradwire.worker.session.replica import ModelError, Replica


def fresh() -> Replica:
    """In four parts, at no version."""
    subject = Replica(nn.Linear(100, 100), 8)
    subject.adopt(subject.manifest.plan(4 * ALIGNMENT))
    return subject


def replica() -> Replica:
    """In four parts, at version 0, all of it 0."""
    subject = fresh()
    with torch.no_grad():
        for parameter in subject.parameters:
            parameter.zero_()
    subject.version = 0
    return subject


def values(subject: Replica) -> list[float]:
    """Return the value of each part, which is the same for all of its elements."""
    flat = np.concatenate([value.view(np.float32) for value in subject.values()])
    found = [set(flat[part.start : part.end].tolist()) for part in subject.plan.parts]
    assert all(len(each) == 1 for each in found)
    return [each.pop() for each in found]


def wholes(subject: Replica, version: int) -> list[Received]:
    """Its version as the new value."""
    return updates(subject, version, [np.full(v.size // 4, version, np.float32) for v in subject.values()])


def delta(subject: Replica, version: int, part: int) -> Received:
    """1 is added, in two payloads."""
    sizes = 7, subject.plan.parts[part].elements - 7
    payloads = [
        DensePayload(format=DenseFormat.FLOAT32, elements=n, data=np.ones(n, np.float32).view(np.uint8))
        for n in sizes
    ]
    headers = tuple(payload_header(payload, m.Content.DELTA) for payload in payloads)
    return Received(m.Update(version=version, part=part, plan=1, payloads=headers), payloads)


def apply(subject: Replica, received: Received) -> None:
    subject.apply(received.update, received.payloads)


@pytest.mark.parametrize("order", [*permutations(range(4))][::5])
def test_it_is_at_a_version_once_all_parts_are(order: tuple[int, ...]) -> None:
    subject = replica()
    for count, part in enumerate(order):
        assert subject.version == 0
        assert sum(values(subject)) == count
        apply(subject, delta(subject, 1, part))
    assert subject.version == 1
    assert values(subject) == [1.0] * 4


def test_a_part_that_it_has_is_passed_over() -> None:
    subject = replica()
    for _ in range(2):
        apply(subject, delta(subject, 1, 2))
    apply(subject, wholes(subject, 1)[2])
    apply(subject, wholes(subject, 0)[2])
    assert values(subject) == [0.0, 0.0, 1.0, 0.0]
    for part in (0, 1, 3):
        apply(subject, delta(subject, 1, part))
    apply(subject, delta(subject, 1, 0))
    assert (subject.version, values(subject)) == (1, [1.0] * 4)


def test_a_change_of_another_version_than_its_own_is_passed_over() -> None:
    subject = replica()
    apply(subject, delta(subject, 2, 1))
    assert (subject.version, values(subject)) == (0, [0.0] * 4)
    new = fresh()
    before = [value.tobytes() for value in new.values()]
    apply(new, delta(new, 1, 1))
    assert new.version is None
    assert [value.tobytes() for value in new.values()] == before


@pytest.mark.parametrize("content", list(m.Content))
def test_what_is_absent_from_an_update_stays_as_it_is(content: m.Content) -> None:
    """This holds for every content of the update."""
    subject = replica()
    for received in wholes(subject, 5):
        apply(subject, received)
    for part, bounds in enumerate(subject.plan.parts):
        nothing = AbsentPayload(elements=bounds.elements)
        header = payload_header(nothing, content)
        update = m.Update(version=6, part=part, plan=1, whole=False, payloads=(header,))
        subject.apply(update, [nothing])
    assert (subject.version, values(subject)) == (6, [5.0] * 4)


@pytest.mark.parametrize("had", [None, 0, 1])
def test_whole_parts_are_taken_in_at_any_version(had: int | None) -> None:
    """After a reconnect parts of several versions may be there; a later one of each makes up for that."""
    subject = replica()
    if had is None:
        subject = fresh()
    if had == 1:
        apply(subject, delta(subject, 1, 3))
    for received in wholes(subject, 5):
        assert subject.version == (None if had is None else 0)
        apply(subject, received)
    assert (subject.version, values(subject)) == (5, [5.0] * 4)
    apply(subject, delta(subject, 6, 0))
    assert (subject.version, values(subject)) == (5, [6.0, 5.0, 5.0, 5.0])


def test_parameters_are_views_of_one_buffer_in_manifest_order() -> None:
    last = nn.Linear(4, 2)
    model = nn.Sequential(nn.Linear(3, 4), last)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    subject = Replica(model, 8)
    extra = torch.arange(5.0)
    subject.include([("momentum", extra)])
    assert [each.name for each in subject.manifest.tensors][-1] == "momentum"
    tensors = [*model.parameters(), extra]
    assert all(torch.equal(new, old) for new, old in zip(tensors, [*before, torch.arange(5.0)], strict=True))
    addresses = [tensor.data_ptr() for tensor in tensors]
    starts = [0, *subject.manifest.ends[:-1]]
    assert addresses == [addresses[0] + 4 * start for start in starts]
    with torch.no_grad():
        last.weight.fill_(3.0)
        extra.fill_(4.0)
    assert subject.values()[2].view(np.float32).tolist() == [3.0] * 8
    assert subject.values()[-1].view(np.float32).tolist() == [4.0] * 5


def test_another_plan_leaves_every_element_where_it_is() -> None:
    subject = replica()
    apply(subject, delta(subject, 1, 2))
    for part in (0, 1, 3):
        apply(subject, delta(subject, 1, part))
    before, addresses = subject.values(), [each.data_ptr() for each in subject.parameters]
    subject.adopt(dataclasses.replace(subject.manifest.plan(1 << 20), number=2))
    assert (subject.version, subject.plan_number, len(subject.plan.parts)) == (1, 2, 1)
    assert [each.data_ptr() for each in subject.parameters] == addresses
    assert [each.tobytes() for each in subject.values()] == [each.tobytes() for each in before]
    apply(subject, delta(subject, 1, 0))
    assert values(subject) == [1.0], "it is at that version already"
    apply(subject, delta(subject, 2, 0))
    assert (subject.version, values(subject)) == (2, [2.0])


def test_parts_that_were_taken_in_early_can_be_put_back() -> None:
    subject = replica()
    weight = subject.parameters[0]
    for part in (1, 3):
        received, before = delta(subject, 1, part), weight._version
        subject.apply(received.update, received.payloads, early=True)
        assert weight._version > before, "autograd has to know"
    assert values(subject) == [0, 1, 0, 1]
    assert subject.version == 0
    assert not subject.is_at(0, 1)
    before = weight._version
    subject.go_back()
    assert (values(subject), subject.undone, subject.version) == ([0, 0, 0, 0], 1, 0)
    assert weight._version > before
    for part in range(4):
        received = delta(subject, 1, part)
        subject.apply(received.update, received.payloads)
    assert (values(subject), subject.version) == ([1, 1, 1, 1], 1)
    assert subject.is_at(0, 1)


def test_once_all_parts_are_here_nothing_is_early() -> None:
    subject = replica()
    for part in range(4):
        received = delta(subject, 1, part)
        subject.apply(received.update, received.payloads, early=True)
    subject.go_back()
    assert (values(subject), subject.undone, subject.version) == ([1, 1, 1, 1], 0, 1)


def test_before_it_has_other_parts_it_goes_back() -> None:
    subject = replica()
    received = delta(subject, 1, 0)
    subject.apply(received.update, received.payloads, early=True)
    subject.adopt(subject.manifest.plan(1 << 30))
    assert (values(subject), subject.undone) == ([0], 1)


def test_parameters_in_bfloat16_are_their_masters_rounded() -> None:
    model = nn.Linear(100, 100).to(torch.bfloat16)
    with pytest.raises(ModelError, match=r"parameter 'weight': expected float32, got torch\.bfloat16"):
        Replica(model, 8)
    subject = Replica(model, 8, masters=True)
    subject.adopt(subject.manifest.plan(4 * ALIGNMENT))
    for received in wholes(subject, 300):
        apply(subject, received)
    for step in (1, 2):  # bfloat16 has 300 and 302, and not 301
        for part in range(4):
            received = delta(subject, 300 + step, part)
            subject.apply(received.update, received.payloads, early=part == 0)
            if part == 0 and step == 2:
                subject.go_back()
                assert model.weight.unique().tolist() == [torch.tensor(301.0).to(torch.bfloat16).item()]
                subject.apply(received.update, received.payloads)
        assert values(subject) == [300.0 + step] * 4
        for parameter in model.parameters():
            assert parameter.unique().tolist() == [torch.tensor(300.0 + step).to(torch.bfloat16).item()]


def test_parameters_in_bfloat16_follow_their_masters_also_where_they_were_pointed_elsewhere() -> None:
    model = nn.Linear(100, 100).to(torch.bfloat16)
    subject = Replica(model, 8, masters=True)
    subject.adopt(subject.manifest.plan(4 * ALIGNMENT))
    for change in (model.float, model.share_memory, model.double):
        change()
        model.bfloat16()
        model.weight.data = model.weight.data.clone()
        assert subject.check()
        assert not subject.check()
        for received in wholes(subject, (subject.version or 0) + 1):
            apply(subject, received)
        assert model.weight.unique().tolist() == [subject.version]


def test_frozen_parameters_are_part_of_it_if_a_group_has_them() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    model[0].requires_grad_(False)
    groups = ParameterGroups(groups=(m.Group(optimizer="sgd"),), number_of={"0.weight": 0, "1.weight": 0})
    subject = Replica(model, 8, groups)
    assert [each.name for each in subject.manifest.tensors] == ["0.weight", "1.weight", "1.bias"]
    model[0].weight.requires_grad_(True)
    subject.check()
    model[0].bias.requires_grad_(True)
    with pytest.raises(ModelError, match=r"'0\.bias' requires a gradient now .* give it to the optimizer"):
        subject.check()


def test_frozen_parameters_that_stay_here_are_compared_by_their_digests() -> None:
    def manifest(base: float) -> Manifest:
        model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
        for parameter in model[0].requires_grad_(False).parameters():
            nn.init.constant_(parameter, base)
        subject = Replica(model, 8, frozen_here=True)
        assert not subject.state.has_values
        assert not subject.state.values(frozen=True)
        return subject.manifest

    ours, same, other = map(manifest, (1.0, 1.0, 2.0))
    assert ours.fingerprint == same.fingerprint != other.fingerprint
    difference = first_difference(ours.to_message(), other.to_message())
    assert all("frozen '0.weight' of float32 [3, 2] with SHA-256 " in each for each in difference)


def test_names_are_those_of_the_model_that_was_compiled() -> None:
    model = nn.Module()
    model._orig_mod = nn.ModuleDict({"block": nn.Module()})
    model._orig_mod["block"]._orig_mod = nn.Linear(2, 3)
    assert [each.name for each in Replica(model, 8).manifest.tensors] == ["block.weight", "block.bias"]


def test_a_buffer_that_was_none_and_has_a_value_now_is_named(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("cache", None)
    model.register_buffer("own", None, persistent=False)
    state = Replica(model, 8).state
    state.warn_of_new()
    assert not caplog.messages
    model.cache, model.own = torch.ones(3), torch.ones(3)
    state.warn_of_new()
    state.warn_of_new()
    (said,) = caplog.messages
    assert said.startswith("'cache': added to the model's state_dict after the job began")


def emptied(value: torch.Tensor) -> torch.Tensor:
    return value[:0]


def first_of(value: torch.Tensor) -> torch.Tensor:
    return value[0]


@pytest.mark.parametrize("change", [torch.Tensor.double, emptied, first_of])
def test_a_buffer_of_another_shape_or_dtype_is_refused_by_name(
    change: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("mean", torch.ones(3))
    state = Replica(model, 8).state
    model.mean = change(torch.ones(3))
    for call in (partial(state.values, frozen=False), partial(state.put, {"mean": np.zeros(12, np.uint8)})):
        with pytest.raises(ModelError, match=r"'mean' was float32 \(3,\) when the job began, and is .* now"):
            call()
