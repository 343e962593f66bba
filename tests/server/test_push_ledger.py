"""The push ledger by itself: which push is handed to control, when, and what comes of the others."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from gradwire.proto import messages as m
from gradwire.proto.refusal import Reason, Refusal, Refused
from gradwire.proto.transfer import digest
from gradwire.server.durable.recorder import Recorder
from gradwire.server.job.events import Apply, Contribution, PushKey
from gradwire.server.shard.reports import Final
from gradwire.server.streams.push_ledger import MAX_OPEN, PushLedger, PushLife

MEMBER = ("w", 1)
CHECKSUMS = {0: 11, 1: 22, 2: 33}


def ledger_of(through: int = 0) -> PushLedger:
    """Return one without a journal, whose shard has no open round. through: last seq that was decided on."""
    core, shard = MagicMock(), MagicMock()
    core.state.roster.get.return_value.last_seq = through
    return PushLedger(core, shard, {}, Recorder())


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


def send(ledger: PushLedger, seq: int, *parts: int) -> None:
    """Parts arrive whole."""
    for part in parts:
        assert ledger.needs_part(key(seq), part, 1)
        assert ledger.store(MEMBER, header(part, seq=seq), CHECKSUMS[part], [])


def handed_on(ledger: PushLedger) -> list[int]:
    """Seqs in the order in which they are complete; each is decided on at once."""
    seqs: list[int] = []
    while (complete := ledger.next(MEMBER, 1)) is not None:
        given, parts = complete
        assert parts == frozenset(CHECKSUMS)
        ledger.decided(key(given.seq), accepted=True)
        seqs.append(given.seq)
    return seqs


@pytest.mark.parametrize("when", range(4))
def test_a_push_is_handed_on_with_its_last_part_wherever_its_commit_comes(when: int) -> None:
    ledger = ledger_of(4)
    for part in range(3):
        if part == when:
            ledger.commit(MEMBER, commit(7))
        assert handed_on(ledger) == []
        send(ledger, 7, part)
    if when == 3:
        assert handed_on(ledger) == []
        ledger.commit(MEMBER, commit(7))
    assert handed_on(ledger) == [7]
    assert (ledger.through(MEMBER), ledger.stored(MEMBER)) == (7, ())


@pytest.mark.parametrize("before", range(4))
def test_an_abandoned_push_is_over_whatever_comes_of_it_before_or_after(before: int) -> None:
    """Before its parts, after half of them, and after the last."""
    ledger = ledger_of()
    send(ledger, 1, *range(before))
    ledger.abandon(key(1))
    assert ledger.is_closed(key(1))
    assert not any(ledger.needs_part(key(1), part, 1) for part in range(3))
    assert not ledger.store(MEMBER, header(2, seq=1), 33, []), "a part that was being scanned meanwhile"
    assert (list(ledger.open(MEMBER)), ledger.stored(MEMBER), ledger.next(MEMBER, 1)) == ([], (), None)
    send(ledger, 2, 0, 1, 2)
    ledger.commit(MEMBER, commit(2))
    assert handed_on(ledger) == [2]


def test_duplicates_of_parts_and_commits_are_of_no_use_and_do_no_harm() -> None:
    ledger = ledger_of()
    send(ledger, 1, 0, 1)
    ledger.commit(MEMBER, commit(1))
    ledger.commit(MEMBER, commit(1))
    assert not ledger.needs_part(key(1), 0, 1)
    assert ledger.store(MEMBER, header(0, seq=1), 11, []), "two copies of it were being scanned"
    assert ledger.stored(MEMBER) == (m.Stored(seq=1, parts=(0, 1)),)
    send(ledger, 1, 2)
    assert handed_on(ledger) == [1]
    assert not ledger.needs_part(key(1), 0, 1), "decided on"
    assert ledger.is_closed(key(1))


def test_a_part_that_was_refused_is_wanted_again_and_holds_up_its_push() -> None:
    ledger = ledger_of()
    send(ledger, 1, 0, 2)
    assert ledger.needs_part(key(1), 1, 1)  # and it is damaged: nothing is stored
    ledger.commit(MEMBER, commit(1))
    assert handed_on(ledger) == []
    send(ledger, 1, 1)
    assert handed_on(ledger) == [1]


def test_a_later_push_waits_for_an_earlier_one_whose_part_comes_again() -> None:
    ledger = ledger_of()
    send(ledger, 1, 0, 1)
    ledger.commit(MEMBER, commit(1))
    send(ledger, 2, 0, 1, 2)
    ledger.commit(MEMBER, commit(2))
    assert handed_on(ledger) == []
    send(ledger, 1, 2)
    assert handed_on(ledger) == [1, 2]


def test_a_later_push_that_is_given_up_does_not_end_an_earlier_one() -> None:
    ledger = ledger_of()
    send(ledger, 1, 0, 1)
    send(ledger, 3, 0)
    ledger.abandon(key(3))
    assert ledger.is_closed(key(3))
    assert not ledger.is_closed(key(1))
    assert ledger.stored(MEMBER) == (m.Stored(seq=1, parts=(0, 1)),)
    ledger.commit(MEMBER, commit(1))
    send(ledger, 1, 2)
    assert handed_on(ledger) == [1]
    assert ledger.is_closed(key(2)), "nothing had come of it when a later one was given up"


@pytest.mark.parametrize("checksums", [{**CHECKSUMS, 1: 23}, {0: 11, 1: 22}, {0: 22, 1: 11, 2: 33}])
def test_what_is_stored_has_to_be_what_was_committed(checksums: dict[int, int]) -> None:
    ledger = ledger_of()
    send(ledger, 1, 0, 1, 2)
    ledger.commit(MEMBER, commit(1, checksums))
    with pytest.raises(Refused) as caught:
        ledger.next(MEMBER, 1)
    assert caught.value.refusal.reason is Reason.CHECKSUM
    ledger.start_over(key(1))
    assert (handed_on(ledger), ledger.stored(MEMBER)) == ([], (m.Stored(seq=1, parts=()),))
    send(ledger, 1, 0, 1, 2)
    assert handed_on(ledger) == [], "its commit has to come again as well"
    ledger.commit(MEMBER, commit(1))
    assert handed_on(ledger) == [1]


def test_a_push_without_parts_needs_only_its_commit() -> None:
    ledger = ledger_of()
    ledger.commit(MEMBER, commit(5, {}))
    complete = ledger.next(MEMBER, 1)
    assert complete is not None
    assert complete == (commit(5, {}), frozenset())


@pytest.mark.parametrize("kind", ["part", "commit"])
def test_open_pushes_have_a_quota(kind: str) -> None:
    def begin(seq: int) -> None:
        if kind == "part":
            assert ledger.needs_part(key(seq), 0, 1)
        else:
            ledger.commit(MEMBER, commit(seq))

    ledger = ledger_of()
    for seq in range(1, MAX_OPEN + 1):
        begin(seq)
    with pytest.raises(Refused) as caught:
        begin(MAX_OPEN + 1)
    assert caught.value.refusal.reason is Reason.SIZE
    begin(3)
    ledger.abandon(key(2))
    begin(MAX_OPEN + 1)


def test_why_a_push_was_refused_is_remembered_for_a_while() -> None:
    ledger, why = ledger_of(), Refusal(reason=Reason.NON_FINITE, message="not finite")
    for seq in range(1, 100):
        assert ledger.needs_part(key(seq), 0, 1)
        ledger.refuse(key(seq), why)
    assert ledger.refusal(key(99)) is why
    assert [seq for seq in range(1, 100) if ledger.refusal(key(seq))] == list(range(100 - MAX_OPEN, 100))


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
    ledger = ledger_of()
    for seq in (1, 2):
        assert ledger.needs_part(key(seq), 0, 3)
    with pytest.raises(Refused, match=words) as caught:
        ledger.rate(MEMBER, header(0, learning_rates=rates), 2)
    assert caught.value.refusal.reason is Reason.GROUP
    for part in range(2):
        ledger.rate(MEMBER, header(part, learning_rates=(0.1, 0.0)), 2)
        ledger.rate(MEMBER, header(part, seq=2), 2)
    ledger.rate(MEMBER, header(1), 2)
    assert ledger.rates(key(1)) == (0.1, 0.0)
    for others in ((0.1, 0.3), (0.1,)):
        with pytest.raises(Refused, match="part 1 learning_rates: expected those of the push's first part"):
            ledger.rate(MEMBER, header(1, learning_rates=others), 2)


def test_one_rate_is_that_of_all_groups() -> None:
    ledger = ledger_of()
    assert ledger.needs_part(key(1), 0, 3)
    ledger.rate(MEMBER, header(0, learning_rates=(0.1,)), 3)
    assert ledger.rates(key(1)) == (0.1, 0.1, 0.1)


# ---- the life of a push


def test_an_accepted_push_keeps_its_parts_until_an_order_takes_them() -> None:
    ledger = ledger_of()
    send(ledger, 1, 0, 1, 2)
    ledger.commit(MEMBER, commit(1))
    assert ledger.open(MEMBER) == {1: PushLife.COMMITTED}
    assert handed_on(ledger) == [1]
    assert (ledger.open(MEMBER), ledger.held) == ({}, [key(1)])
    ledger.abandon(key(1))  # which is over
    contributions = tuple(Contribution(key=key(1), rank=0, samples=n, loss=0.0) for n in (0, 1))
    order = Apply(version=1, contributions=contributions, rate_factor=1.0, opened_at=0.0)
    assert ledger.take(order) == ([{}, {0: [], 1: [], 2: []}], ())
    assert ledger.held == []


@pytest.mark.parametrize("committed", [False, True])
def test_an_unwanted_push_keeps_nothing_and_is_handed_on_without_parts(committed: bool) -> None:
    ledger = ledger_of()
    send(ledger, 1, 0, 1)
    if committed:
        ledger.commit(MEMBER, commit(1))
    ledger.mark_unwanted(key(1))
    ledger.mark_unwanted(key(1))
    assert (ledger.open(MEMBER), ledger.held) == ({1: PushLife.UNWANTED}, [])
    assert not ledger.needs_part(key(1), 2, 1)
    ledger.commit(MEMBER, commit(1))
    assert ledger.next(MEMBER, 1) == (commit(1), frozenset())
    ledger.start_over(key(1))
    assert ledger.open(MEMBER) == {1: PushLife.OPEN}
    send(ledger, 1, 0, 1, 2)
    ledger.commit(MEMBER, commit(1))
    assert handed_on(ledger) == [1]


def test_the_image_of_a_ledger_and_the_parts_carried_over_make_the_same_ledger() -> None:
    ledger, other = ledger_of(), ledger_of()
    send(ledger, 1, 0, 1, 2)
    ledger.commit(MEMBER, commit(1))
    assert handed_on(ledger) == [1]
    send(ledger, 2, 1)
    ledger.rate(MEMBER, header(1, seq=2, learning_rates=(0.5,)), 1)
    send(ledger, 3, 0)
    ledger.mark_unwanted(key(3))
    other.restore(ledger.image())
    for member, part, checksum, payloads in ledger.stored_parts(1):
        other.restore_part(member, part, checksum, payloads)
    assert other.open(MEMBER) == ledger.open(MEMBER) == {2: PushLife.OPEN, 3: PushLife.UNWANTED}
    assert other.stored(MEMBER) == ledger.stored(MEMBER)
    assert (other.through(MEMBER), other.held) == (1, [key(1), key(2)])
    assert other.rates(key(2)) == (0.5,)


def test_parts_that_count_are_remembered_until_their_push_is_applied_as_a_whole() -> None:
    ledger = ledger_of()
    assert (ledger.ask_substitute(9, 3), ledger.asked_parts(9)) == ((), ()), "no round is open"
    ledger.open_round()
    for part in (2, 0):
        ledger.final(Final(version=1, part=part, keys=(key(1), key(2)), first=part == 2, last=False))
    assert ledger.ask_substitute(9, 4) == ledger.asked_parts(9) == (1, 3)
    assert ledger.asked_parts(8) == ()
    contribution = Contribution(key=key(1), rank=0, samples=0, loss=0.0)
    ledger.take(Apply(version=1, contributions=(contribution,), rate_factor=1.0, opened_at=0.0))
    assert not ledger.counted_parts(key(1))
    assert ledger.counted_parts(key(2)) == {0, 2}
    assert ledger.asked_parts(9) == (), "its round is closed"
