"""The session as its owner drives it: several open pushes, settled in any order; updates between steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
import pytest
import torch
from scripted import Script, updates
from torch import nn

from gradwire.common.parts import ALIGNMENT, Plan
from gradwire.compressors import LayerRule, ModelCompressor, NonFiniteGradient, PushTerms, decode
from gradwire.proto import messages as m
from gradwire.proto.refusal import Reason, Refusal, Refused
from gradwire.worker.metrics import WorkerMetrics
from gradwire.worker.session.compression import Compression
from gradwire.worker.session.connection import Connection
from gradwire.worker.session.own_state import OwnState
from gradwire.worker.session.pushes import MAX_RESENDS, Push
from gradwire.worker.session.receiving import Received, ReceivedPacket
from gradwire.worker.session.replica import Replica
from gradwire.worker.session.session import Session

ELEMENTS = 35


def session(
    script: Script,
    compressor: str = "topk:ratio=8",
    *,
    model: nn.Module | None = None,
    in_parts: bool = False,
) -> Session:
    torch.manual_seed(1)
    replica = Replica(model or nn.Linear(6, 5), 64)
    replica.adopt(replica.manifest.plan(4 * ALIGNMENT))
    script.plan = replica.plan
    specs = replica.manifest.specs
    made = ModelCompressor(specs, compressor, LayerRule(), 1, 0, plan=replica.plan)
    compression = Compression(made, in_parts=in_parts)
    metrics = WorkerMetrics(compressor)
    return Session(cast("Connection", script), replica, compression, metrics, initialize=True)


def gradients(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(5, 6, generator=generator), torch.randn(5, generator=generator)]


def flat(seed: int) -> np.ndarray[Any, Any]:
    return torch.cat([each.reshape(-1) for each in gradients(seed)]).numpy()


def assignment(id: int, version: int = 0, **changes: Any) -> m.Assignment:
    fields: dict[str, Any] = {"id": id, "version": version, "ranges": (m.Range(start=0, count=4),)}
    return m.Assignment(**{**fields, **changes})


def push(
    subject: Session, given: m.Assignment, seed: int = 0, tensors: list[torch.Tensor] | None = None
) -> None:
    subject.commit(begun(subject, given, gradients(seed) if tensors is None else tensors), 0.5)


def begun(subject: Session, given: m.Assignment, tensors: list[torch.Tensor]) -> Push:
    """A push of which all parts have been sent."""
    opened = subject.begin_push(given, PushTerms(samples=4, version=given.version))
    for place in reversed(range(len(tensors))):
        opened.add(place, tensors[place])
    return opened


def accepted(seq: int) -> m.Outcome:
    return m.Outcome(seq=seq, decision=m.Decision.ACCEPTED, version=seq)


def refused(seq: int, reason: Reason, part: int | None = None) -> m.Outcome:
    why = Refusal(reason=reason, message="no")
    return m.Outcome(seq=seq, decision=m.Decision.REFUSED, refusal=why, part=part)


def decoded(script: Script, place: int) -> np.ndarray[Any, Any]:
    """Return the decoded pushes, in the order of the commits."""
    return np.concatenate([decode(payload) for payload in script.pushed[place][1]])


def sent(script: Script, seq: int) -> np.ndarray[Any, Any]:
    """Where each push was committed."""
    return decoded(script, seq - 1)


def residual(subject: Session) -> np.ndarray[Any, Any]:
    return subject.compression.ledger.residual.numpy()


def update(subject: Session, version: int) -> Received:
    """To parameters that are all `version`."""
    values = [np.full(value.size // 4, version, np.float32) for value in subject.replica.values()]
    (received,) = updates(subject.replica, version, values)
    return received


def test_an_outcome_that_comes_twice_counts_once() -> None:
    script = Script(refused(1, Reason.STALE), refused(1, Reason.STALE))
    subject = session(script, "none")
    push(subject, assignment(1), 1)
    subject.next(0)
    subject.next(0)
    np.testing.assert_array_equal(residual(subject), flat(1))
    assert script.settled == [1]


@pytest.mark.parametrize("reason", [Reason.STALE, Reason.REDUNDANT])
def test_parts_that_count_of_a_refused_push_are_not_owed_and_the_others_only_if_nobody_sends_them(
    reason: Reason,
) -> None:
    script = Script()
    subject = session(script, "none", model=nn.Linear(100, 100), in_parts=True)
    given = [torch.randn(100, 100), torch.randn(100)]
    subject.begin()
    opened = begun(subject, assignment(1), given)
    subject.commit(opened, 0.5)
    script.messages = [dataclasses.replace(refused(1, reason), counted=(0, 2))]
    subject.next(0)
    whole = torch.cat([each.reshape(-1) for each in given]).numpy()
    expected = np.zeros_like(whole)
    for part in (1, 3) if reason is Reason.STALE else ():
        bounds = subject.replica.plan.parts[part]
        expected[bounds.start : bounds.end] = whole[bounds.start : bounds.end]
    assert reason is Reason.REDUNDANT or residual(subject).tolist() == expected.tolist()
    assert subject.held_back == pytest.approx(float(np.linalg.norm(expected)))
    assert script.settled == [1]


def test_updates_are_applied_by_next_and_by_nothing_else() -> None:
    script = Script()
    subject = session(script)
    subject.begin()
    script.messages = [update(subject, 1), update(subject, 2), assignment(1, 2)]
    for version in (1, 2):
        push(subject, assignment(version + 10, 0), version)
        assert subject.replica.version == version - 1
        assert subject.next(0) is None
        assert subject.replica.version == version
        assert all(bool((each == version).all()) for each in subject.replica.parameters)
    given = subject.next(0)
    assert given is not None
    assert given.version == 2


def in_parts(script: Script) -> tuple[Session, list[torch.Tensor]]:
    """Return a session of a model in four parts, and gradients of it."""
    subject = session(script, model=nn.Linear(100, 100))
    subject.begin()
    return subject, [torch.randn(100, 100), torch.randn(100)]


def test_parts_leave_before_the_push_counts() -> None:
    script = Script()
    subject, given = in_parts(script)
    opened = subject.begin_push(assignment(1), PushTerms(samples=4))
    opened.add(1, given[1])
    assert [*script.parts] == [(1, 0)]
    opened.add(0, given[0])
    assert [*script.parts] == [(1, part) for part in range(4)]
    assert all(header.assignment == 1 for header, _ in script.parts.values())
    assert (script.pushed, subject.open_pushes) == ([], 0)
    assert subject.commit(opened, 0.5)
    ((commit, payloads),) = script.pushed
    assert (commit.seq, commit.parts, commit.samples, subject.open_pushes) == (1, 4, 4, 1)
    assert sum(payload.elements for payload in payloads) == 10_100


def test_a_damaged_part_is_sent_again_and_nothing_else() -> None:
    """Whether the push has been committed by then or not, and not for ever."""
    script = Script(refused(1, Reason.CHECKSUM, 2), refused(1, Reason.CHUNK, 3), accepted(1))
    subject, given = in_parts(script)
    opened = begun(subject, assignment(1), given)
    subject.next(0)
    subject.commit(opened, 0.5)
    subject.next(0)
    assert script.resent == [(1, 2), (1, 3)]
    assert subject.open_pushes == 1
    subject.next(0)
    assert subject.open_pushes == 0
    script.messages = [refused(2, Reason.CHECKSUM, 0)] * (MAX_RESENDS + 1)
    begun(subject, assignment(2), given)
    for _ in range(MAX_RESENDS):
        subject.next(0)
    with pytest.raises(Refused):
        subject.next(0)
    assert len(script.resent) == 2 + MAX_RESENDS


def test_any_other_refusal_of_a_part_that_is_being_made_is_raised() -> None:
    script = Script(refused(1, Reason.PAYLOAD, 2))
    subject, given = in_parts(script)
    begun(subject, assignment(1), given)
    with pytest.raises(Refused):
        subject.next(0)


def test_what_is_said_of_an_abandoned_push_is_passed_over() -> None:
    script = Script(refused(1, Reason.PAYLOAD), refused(1, Reason.CHECKSUM, 0))
    subject, given = in_parts(script)
    subject.abandon(begun(subject, assignment(1), given))
    assert residual(subject).max() == 0
    for _ in range(2):
        assert subject.next(0) is None
    assert (script.abandoned, script.resent, script.pushed) == ([1], [], [])


def test_an_assignment_is_held_until_its_version_is_whole() -> None:
    script = Script()
    subject, _ = in_parts(script)
    later, last = updates(subject.replica, 1), updates(subject.replica, 2)
    script.messages = [later[0], assignment(1, 2), *later[1:], *last]
    for _ in range(8):
        assert subject.next(0) is None
    given = subject.next(0)
    assert given is not None
    assert (given.version, subject.replica.version) == (2, 2)
    assert script.at == [0, 1, 2]
    script.messages = [assignment(2, 2), *updates(subject.replica, 3), assignment(3, 9, finished=True)]
    assert subject.next(0) is not None  # it is there already
    for _ in range(4):
        assert subject.next(0) is None
    assert subject.next(0) is not None  # whatever the version, to leave


def test_an_assignment_that_waits_gives_way_to_the_next() -> None:
    script = Script()
    subject, _ = in_parts(script)
    script.messages = [assignment(1, 1), assignment(2, 1), *updates(subject.replica, 1)]
    found = [subject.next(0) for _ in range(6)]
    assert found[:5] == [None] * 5
    assert found[5] is not None
    assert found[5].id == 2


def test_an_assignment_is_new_until_it_is_answered() -> None:
    subject = session(Script())
    first = assignment(1)
    assert subject.is_new(first)
    subject.skip(first)
    assert not subject.is_new(first)
    assert subject.is_new(assignment(2))
    assert not subject.is_new(assignment(3, ranges=()))


def test_a_gradient_that_is_not_finite_is_skipped_and_changes_nothing() -> None:
    script, calm = Script(), Script()
    subject, other = session(script), session(calm)
    bad = gradients(1)
    bad[0][0, 0] = float("nan")
    opened = subject.begin_push(assignment(1), PushTerms(samples=4))
    opened.add(1, bad[1])
    with pytest.raises(NonFiniteGradient):
        opened.add(0, bad[0])
    subject.abandon(opened)
    assert script.abandoned == [1]
    for each in (subject, other):
        each.skip(assignment(1))
        push(each, assignment(2), 2)
    assert [header.samples for header, _ in script.pushed] == [0, 4]
    np.testing.assert_array_equal(decoded(script, 1), decoded(calm, 1))
    np.testing.assert_array_equal(residual(subject), residual(other))


def test_leaving_is_finished_when_everything_is_handed_over() -> None:
    script = Script(accepted(1), accepted(2))
    subject = session(script)
    push(subject, assignment(1), 1)
    subject.leave()
    assert not subject.finished_leaving
    subject.next(0)
    assert subject.held_back > 0
    assert not subject.finished_leaving
    hurries = script.hurries
    push(subject, assignment(2), 2)
    assert script.hurries == hurries + 1, "its pace was found for less"
    assert not subject.finished_leaving
    subject.next(0)
    assert subject.finished_leaving
    np.testing.assert_allclose(sent(script, 1) + sent(script, 2), flat(1) + flat(2), rtol=1e-5, atol=1e-6)


def test_a_refusal_that_nothing_mends_is_raised() -> None:
    subject = session(Script(refused(1, Reason.ELEMENTS)))
    push(subject, assignment(1), 1)
    with pytest.raises(Refused):
        subject.next(0)


def test_packets_go_to_what_has_registered_for_them() -> None:
    packet = ReceivedPacket(m.Packet(exchange=1, index=0, elements=0), np.zeros(0, np.uint32))
    with pytest.raises(RuntimeError, match="in a job without coded packets"):
        session(Script(packet)).next(0)

    class Handler:
        def __init__(self) -> None:
            self.heard: list[object] = []

        def apply(self, exchange: int, version: int) -> None:
            self.heard.append((exchange, version))
            subject.replica.version = version

        def take(self, packet: ReceivedPacket) -> None:
            self.heard.append(packet)

        def snapshot(self, version: int) -> None:
            self.heard.append(version)

    handler = Handler()
    subject = session(Script(packet, m.SnapshotRequest(version=5, apply=3), assignment(1, 6, apply=4)))
    subject.packets.handler = handler
    for _ in range(3):
        subject.next(0)
    assert handler.heard == [packet, (3, 5), 5, (4, 6)]


# ---- a new plan


def one_part(subject: Session) -> Plan:
    return dataclasses.replace(subject.replica.manifest.plan(1 << 20), number=2)


def test_an_assignment_is_held_until_its_plan_is_here() -> None:
    """It overtakes the plan, which has its place among the updates."""
    script = Script()
    subject, _ = in_parts(script)
    plan = one_part(subject)
    first = updates(subject.replica, 1)
    script.messages = [assignment(1, 1, plan=2), *first, plan]
    for _ in range(5):
        assert subject.next(0) is None
    assert (subject.replica.version, subject.replica.plan_number) == (1, 1)
    given = subject.next(0)
    assert given is not None
    assert (given.id, subject.replica.plan_number) == (1, 2)
    push(subject, given, tensors=[torch.randn(100, 100), torch.randn(100)])
    assert [*script.parts] == [(1, 0)]
    (commit, _), (header, _) = script.pushed[0], script.parts[1, 0]
    assert (commit.parts, commit.plan, header.plan) == (1, 2, 2)


def test_an_update_that_was_not_whole_is_forgotten_with_its_plan() -> None:
    script = Script()
    subject, _ = in_parts(script)
    script.messages = [*updates(subject.replica, 1)[:3], one_part(subject)]
    for _ in range(4):
        subject.next(0)
    script.messages = [*updates(subject.replica, 1, plan=2)]
    subject.next(0)
    assert subject.replica.version == 1


def test_a_stale_push_is_put_back_by_the_plan_that_it_was_made_under() -> None:
    """Parts of it that count all the same are numbered by that plan."""
    script = Script()
    subject, given = in_parts(script)
    push(subject, assignment(1), tensors=given)
    bounds = subject.replica.plan.parts[1]
    owed = residual(subject).copy()
    sent = np.concatenate([decode(payload) for _, payload in sorted_payloads(script, 1)])
    script.messages = [one_part(subject), dataclasses.replace(refused(1, Reason.STALE), counted=(1,))]
    for _ in range(2):
        assert subject.next(0) is None
    assert subject.open_pushes == 0
    expected = owed + sent
    expected[bounds.start : bounds.end] = owed[bounds.start : bounds.end]
    np.testing.assert_allclose(residual(subject), expected, rtol=1e-6, atol=1e-6)


def sorted_payloads(script: Script, seq: int) -> list[tuple[int, Any]]:
    """Return the payloads of a push, by their start."""
    assert script.plan is not None
    parts = script.plan.parts
    found = {
        parts[part].start: payloads for (each, part), (_, payloads) in script.parts.items() if each == seq
    }
    return [(start, payload) for start in sorted(found) for payload in found[start]]


def test_an_assignment_is_let_go_if_its_version_was_lost_with_the_stream_that_it_came_on() -> None:
    """Another follows it, perhaps only after the updates that came with a new plan."""
    script = Script()
    subject, _ = in_parts(script)
    script.messages = [assignment(1, 1), *updates(subject.replica, 1)[:2]]
    for _ in range(3):
        assert subject.next(0) is None
    script.messages = [*updates(subject.replica, 3), assignment(2, 3)]
    for _ in range(4):
        assert subject.next(0) is None
    given = subject.next(0)
    assert given is not None
    assert given.id == 2


def test_learning_rates_go_with_every_part_of_their_push() -> None:
    script = Script()
    subject = session(script, "none", model=nn.Linear(100, 100))
    torch.manual_seed(1)
    given = [torch.randn(100, 100), torch.randn(100)]
    for id, rates in ((1, (0.1, 0.2)), (2, ())):
        opened = subject.begin_push(assignment(id), PushTerms(samples=4), list(rates))
        for place in (1, 0):
            opened.add(place, given[place])
        subject.commit(opened, 0.5)
    found = {(seq, header.learning_rates) for (seq, _), (header, _) in script.parts.items()}
    assert found == {(1, (0.1, 0.2)), (2, ())}
    assert sum(seq == 1 for seq, _ in script.parts) > 2


def test_the_state_that_a_worker_goes_on_from_is_not_written_again_before_it_has_done_anything() -> None:
    """The owner has not got to where it was yet."""
    script = Script(accepted(1), m.Save(version=7), m.Save(version=8))
    before = session(script)
    push(before, assignment(1), 1)
    before.next(0)
    images: list[object] = []

    def image() -> dict[str, object]:
        images.append(1)
        return {}

    tree = {"compression": before.compression.image(), "buffers": before._state.image(), "owner": {}}  # pyright: ignore[reportPrivateUsage]
    subject = session(script)
    subject.saving.keep(image)
    subject.saving.restore(7, tree, 7)
    subject.begin()
    for _ in range(2):
        subject.next(0)
    assert script.saved_at == [(7, "")]
    assert not subject.saving.due
    assert not images


def test_a_restored_residual_of_an_earlier_version_is_not_written_as_one_of_the_next() -> None:
    """A worker that returns, sees an update and is asked for its state before any work."""
    before = session(Script(accepted(1)))
    push(before, assignment(1), 1)
    before.next(0)
    tree = {"compression": before.compression.image(), "buffers": before._state.image(), "owner": {}}  # pyright: ignore[reportPrivateUsage]
    subject = session(Script())
    subject.saving.restore(7, tree, 7)
    assert subject.held_back > 0
    assert subject.saving.kept == 7
    written: list[Mapping[str, Any]] = []

    class Files:
        def write(self, version: int, tree: Mapping[str, Any], done: Callable[[str], None]) -> None:
            written.append({"version": version, **tree})
            done("")

    subject.saving._own = cast("OwnState", Files())  # pyright: ignore[reportPrivateUsage]
    subject.replica.version = 8
    subject.saving.request(8)
    subject.saving.write()
    (state,) = written
    assert state["version"] == subject.saving.kept == 8
    subject.saving.begin_work(8)
    assert subject.saving.kept is None
    other = session(Script())
    other.saving.restore(8, state, 8)
    assert other.held_back == 0
