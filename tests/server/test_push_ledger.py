"""The push ledger by itself: which push is handed to control, when, and what comes of the others."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from pushes import held

from gradwire.proto import messages as m
from gradwire.proto.refusal import Reason, Refusal, Refused
from gradwire.proto.transfer import digest
from gradwire.server.durable.recorder import Recorder
from gradwire.server.job.events import Apply, Contribution, PushKey
from gradwire.server.shard.reports import Final
from gradwire.server.streams.final_parts import FinalParts
from gradwire.server.streams.outbox import WorkerStream
from gradwire.server.streams.push_ledger import MAX_OPEN, PushLedger
from gradwire.server.streams.push_record import Due, PushLife, PushRecord

MEMBER = ("w", 1)
CHECKSUMS = {0: 11, 1: 22, 2: 33}


class Ledger(PushLedger):
    """One without a journal, whose shard takes everything, and the stream of its only member."""

    def __init__(self, through: int = 0) -> None:
        """through: last seq that was decided on."""
        core: Any = MagicMock()
        self.known: Any = MagicMock()
        self.control = core
        core.state.plan = self.known.reported.plan.number = 1
        core.state.roster.get.return_value.last_seq = through
        core.state.roster.members = {}
        core.state.unwanted.return_value = core.state.rules.script = False
        self.known.reported.manifest.groups = [0, 1]
        self.stream = WorkerStream(*MEMBER, MagicMock(ended_with=None), MagicMock())
        self.parts = FinalParts()
        super().__init__(core, self.known, {"w": self.stream}, Recorder(), self.parts, MagicMock())

    def needs(self, seq: int, part: int, **changes: Any) -> bool:
        return self.arrive(self.stream, header(part, seq=seq, **changes))

    def send(self, seq: int, *parts: int) -> Due | None:
        """Parts arrive whole. Return the last answer."""
        due = None
        for part in parts:
            assert self.needs(seq, part)
            due = self.store(self.stream, header(part, seq=seq), CHECKSUMS[part], [])
        return due

    def declare(self, seq: int, checksums: dict[int, int] = CHECKSUMS) -> Due | None:
        return self.commit(self.stream, commit(seq, checksums))

    def handed_on(self) -> list[int]:
        """Seqs in the order in which they are due; each is accepted at once."""
        seqs: list[int] = []
        while (due := self.next(self.stream)) is not None:
            assert due.refusal is None
            outcome = m.Outcome(seq=due.event.seq, decision=m.Decision.ACCEPTED, version=1)
            self.decided(key(due.event.seq), outcome, repeated=False)
            seqs.append(due.event.seq)
        return seqs

    @property
    def through(self) -> int:
        members = self.image()["members"]
        return 0 if MEMBER not in members else members[MEMBER]["through"]


def key(seq: int) -> PushKey:
    return PushKey(*MEMBER, seq)


def header(part: int, **changes: Any) -> m.PartHeader:
    fields: dict[str, Any] = {"seq": 1, "assignment": 1, "part": part, "plan": 1, "payloads": ()}
    return m.PartHeader(**{**fields, **changes})


def commit(seq: int, checksums: dict[int, int] = CHECKSUMS) -> m.Commit:
    return m.Commit(
        seq=seq,
        assignment=1,
        base_version=0,
        samples=1,
        parts=len(checksums),
        digest=digest(checksums),
        plan=1,
    )


@pytest.mark.parametrize("when", range(4))
def test_a_push_is_handed_on_with_its_last_part_wherever_its_commit_comes(when: int) -> None:
    ledger = Ledger(4)
    for part in range(3):
        if part == when:
            assert ledger.declare(7) is None
        last = ledger.send(7, part)
        assert (last is not None) == (part == 2 and when < 3)
    if when == 3:
        assert ledger.declare(7) is not None
    assert ledger.handed_on() == [7]
    assert (ledger.through, ledger.stored(MEMBER)) == (7, ())


def test_duplicates_of_parts_and_commits_are_of_no_use_and_do_no_harm() -> None:
    ledger = Ledger()
    ledger.send(1, 0, 1)
    ledger.declare(1)
    ledger.declare(1)
    assert not ledger.needs(1, 0)
    ledger.store(ledger.stream, header(0), 12, [])  # two copies of it were being scanned
    assert ledger.stored(MEMBER) == (m.Stored(seq=1, parts=(0, 1)),)
    ledger.send(1, 2)
    assert ledger.handed_on() == [1]
    assert not ledger.needs(1, 0), "decided on"
    ledger.control.state.roster.get.return_value.last_seq = 1
    again = ledger.declare(1)
    assert again is not None
    assert (again.event.seq, again.refusal) == (1, None), "control repeats its outcome"


def test_a_later_push_waits_for_an_earlier_one_whose_part_comes_again() -> None:
    ledger = Ledger()
    ledger.send(1, 0, 1)
    ledger.declare(1)
    ledger.send(2, 0, 1, 2)
    ledger.declare(2)
    assert ledger.handed_on() == []
    ledger.send(1, 2)
    assert ledger.handed_on() == [1, 2]


def test_a_later_push_that_is_given_up_does_not_end_an_earlier_one() -> None:
    ledger = Ledger()
    ledger.send(1, 0, 1)
    ledger.send(3, 0)
    ledger.abandon(key(3))
    assert not ledger.needs(2, 0), "nothing had come of it when a later one was given up"
    assert ledger.stored(MEMBER) == (m.Stored(seq=1, parts=(0, 1)),)
    assert ledger.declare(1) is None
    ledger.send(1, 2)
    assert ledger.handed_on() == [1]


@pytest.mark.parametrize("checksums", [{**CHECKSUMS, 1: 23}, {0: 11, 1: 22}, {0: 22, 1: 11, 2: 33}])
def test_what_is_stored_has_to_be_what_was_committed(checksums: dict[int, int]) -> None:
    ledger = Ledger()
    ledger.send(1, 0, 1, 2)
    due = ledger.declare(1, checksums)
    assert due is not None
    assert due.refusal is not None
    assert due.refusal.reason is Reason.CHECKSUM
    assert (ledger.handed_on(), ledger.stored(MEMBER)) == ([], (m.Stored(seq=1, parts=()),))
    ledger.send(1, 0, 1, 2)
    assert ledger.handed_on() == [], "its commit has to come again as well"
    ledger.declare(1)
    assert ledger.handed_on() == [1]


def test_a_push_without_parts_needs_only_its_commit() -> None:
    assert Ledger().declare(5, {}) is not None


@pytest.mark.parametrize("kind", ["part", "commit"])
def test_open_pushes_have_a_quota(kind: str) -> None:
    def begin(seq: int) -> None:
        if kind == "part":
            assert ledger.needs(seq, 0)
        else:
            ledger.declare(seq)

    ledger = Ledger()
    for seq in range(1, MAX_OPEN + 1):
        begin(seq)
    with pytest.raises(Refused) as caught:
        begin(MAX_OPEN + 1)
    assert caught.value.refusal.reason is Reason.SIZE
    begin(3)
    ledger.abandon(key(2))
    begin(MAX_OPEN + 1)


def test_why_a_push_was_refused_is_remembered_for_a_while() -> None:
    ledger, why = Ledger(), Refusal(reason=Reason.NON_FINITE, message="not finite")
    for seq in range(1, 100):
        assert ledger.needs(seq, 0)
        ledger.refuse(key(seq), why)
    answers = {seq: ledger.declare(seq) for seq in range(1, 100)}
    known = [seq for seq, due in answers.items() if due is not None and due.refusal is why and due.repeated]
    assert known == list(range(100 - MAX_OPEN, 100))


def test_the_digest_depends_on_which_part_has_which_checksum() -> None:
    checksums = {part: int(value) for part, value in enumerate(np.random.default_rng(1).integers(0, 99, 5))}
    assert digest(checksums) == digest(dict(reversed(checksums.items())))
    assert digest(checksums) != digest({**checksums, 0: checksums[1], 1: checksums[0]})


# ---- learning rates of pushes


@pytest.mark.parametrize(
    ("rates", "words"),
    [
        ((0.1, 0.1, 0.1), "expected 2, one for each parameter group, or 1 for all groups, or none, got 3"),
        ((0.1, float("nan")), "expected finite numbers of at least 0, got nan for group 1"),
        ((-0.1,), "expected finite numbers of at least 0, got -0.1 for group 0"),
        ((0.1, float("inf")), "expected finite numbers of at least 0"),
        ((-0.1, 0.1), "expected finite numbers of at least 0"),
    ],
)
def test_learning_rates_that_there_cannot_be_are_refused(rates: tuple[float, ...], words: str) -> None:
    push = PushRecord()
    with pytest.raises(Refused, match=words) as caught:
        push.take_rates("w", header(0, learning_rates=rates), 2)
    assert caught.value.refusal.reason is Reason.GROUP
    push.take_rates("w", header(0, learning_rates=(0.1, 0.0)), 2)
    push.take_rates("w", header(1), 2)
    assert push.rates == (0.1, 0.0)
    for others in ((0.1, 0.3), (0.1,)):
        with pytest.raises(Refused, match="part 1 learning_rates: expected those of the push's first part"):
            push.take_rates("w", header(1, learning_rates=others), 2)


def test_one_rate_is_that_of_all_groups() -> None:
    push = PushRecord()
    push.take_rates("w", header(0, learning_rates=(0.1,)), 3)
    assert push.rates == (0.1, 0.1, 0.1)


# ---- the life of a push


def test_an_accepted_push_keeps_its_parts_until_an_order_takes_them() -> None:
    ledger = Ledger()
    ledger.send(1, 0, 1, 2)
    ledger.declare(1)
    assert ledger.open(MEMBER) == {1: PushLife.COMMITTED}
    assert ledger.handed_on() == [1]
    assert (ledger.open(MEMBER), held(ledger)) == ({}, [key(1)])
    ledger.abandon(key(1))  # which is over
    contributions = tuple(Contribution(key=key(1), rank=0, samples=n, loss=0.0) for n in (0, 1))
    order = Apply(version=1, contributions=contributions, rate_factor=1.0, opened_at=0.0)
    assert ledger.take(order) == ([{}, {0: [], 1: [], 2: []}], ())
    assert held(ledger) == []


def test_parts_that_count_are_remembered_until_their_push_is_applied_as_a_whole() -> None:
    ledger = Ledger()
    parts = ledger.parts
    assert (parts.ask(9, 3), parts.asked(9)) == (0, ()), "no round is open"
    parts.open_round()
    for part in (2, 0):
        parts.record(Final(version=1, part=part, keys=(key(1), key(2)), first=part == 2, last=False))
    assert (parts.ask(9, 4), parts.asked(9), parts.asked(8)) == (2, (1, 3), ())
    contribution = Contribution(key=key(1), rank=0, samples=0, loss=0.0)
    ledger.take(Apply(version=1, contributions=(contribution,), rate_factor=1.0, opened_at=0.0))
    assert (parts.of(key(1)), parts.of(key(2))) == ((), (0, 2))
    assert parts.asked(9) == (), "its round is closed"
