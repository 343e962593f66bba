"""Parts of pushes as they arrive: a few at a time on a stream, and what outlives it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pushes import cut_plan, dense

from gradwire.compressors import Payload
from gradwire.proto import messages as m
from gradwire.proto.manifest import Manifest
from gradwire.proto.refusal import Reason, Refusal, Refused
from gradwire.proto.transfer import MAX_ARRIVING, digest, encode_chunks, part_transfer, payload_header
from gradwire.proto.wire import decode_envelope
from gradwire.server.shard.inbox import MAX_OPEN, Arrivals, Inbox

SHAPES = ((5, 3), (2,), ())
MANIFEST = Manifest(
    tuple(m.Tensor(name=f"t{i}", shape=shape, dtype="float32") for i, shape in enumerate(SHAPES)), 100
)
PARTS = cut_plan((8, 7), (2,), (1,))


# ---- parts on one stream


def header(part: int, payloads: list[Payload], **changes: Any) -> m.Part:
    fields: dict[str, Any] = {"seq": 1, "assignment": 3, "part": part, "plan": 1}
    return m.Part(**{**fields, **changes}, payloads=tuple(map(payload_header, payloads)))


def chunks(given: m.Part, payloads: list[Payload]) -> list[m.Chunk]:
    transfer = part_transfer(given.seq, given.part)
    found: list[m.Chunk] = []
    for message in encode_chunks(transfer, [payload.data for payload in payloads]):
        chunk = decode_envelope(message, "WorkerMessage")
        assert isinstance(chunk, m.Chunk)
        found.append(chunk)
    return found


def test_a_part_is_complete_with_its_last_byte_and_may_hold_several_payloads() -> None:
    inbox, payloads = Inbox("w"), [dense(1, 2, 3), dense(4, 5, 6, 7, 8)]
    given = header(2, payloads)
    inbox.begin(given, MANIFEST, PARTS)
    assert inbox.arriving(part_transfer(1, 2)) is given
    assert inbox.take() is None
    for chunk in chunks(given, payloads):
        inbox.add(chunk)
    complete = inbox.take()
    assert complete is not None
    assert complete[0] is given
    assert [bytes(payload.data) for payload in complete[1].finish()] == [bytes(p.data) for p in payloads]
    assert inbox.arriving(part_transfer(1, 2)) is None
    assert inbox.take() is None


@pytest.mark.parametrize(
    ("given", "reason", "text"),
    [
        (header(4, [dense(1)]), Reason.PLAN, "a part below 4"),
        (header(0, [dense(1)], plan=2), Reason.PLAN, "plan 1"),
        (header(0, [dense(1, 2)]), Reason.ELEMENTS, "2 elements"),
        (header(3, [dense(1, 2), dense(3)]), Reason.ELEMENTS, "7 elements"),
        (header(1, [dense(1, 2), dense()]), Reason.ELEMENTS, "none empty"),
    ],
)
def test_a_part_that_does_not_fit_is_refused_before_memory_is_taken_and_its_chunks_are_dropped(
    given: m.Part, reason: Reason, text: str
) -> None:
    inbox = Inbox("w")
    with pytest.raises(Refused, match=text) as caught:
        inbox.begin(given, MANIFEST, PARTS)
    assert caught.value.refusal.reason is reason
    assert caught.value.refusal.worker == "w"
    assert inbox.arriving(part_transfer(given.seq, given.part)) is None
    for chunk in chunks(given, [dense(1, 2, 3)]):
        inbox.add(chunk)
    assert inbox.take() is None


LARGE = 200_000  # elements, which travel in two chunks
LARGE_MANIFEST = Manifest(
    tuple(m.Tensor(name=f"t{i}", shape=(LARGE,), dtype="float32") for i in range(6)), 100
)
LARGE_PARTS = cut_plan(*[(LARGE,)] * 6)


def large(part: int, seq: int = 1, **changes: Any) -> tuple[m.Part, m.Chunk, m.Chunk]:
    payloads: list[Payload] = [dense(*range(part, part + LARGE))]
    given = header(part, payloads, seq=seq, **changes)
    first, second = chunks(given, payloads)
    return given, first, second


def test_a_part_that_begins_anew_takes_the_place_of_what_had_arrived() -> None:
    inbox, (given, first, second) = Inbox("w"), large(1)
    for _ in range(2):
        inbox.begin(given, LARGE_MANIFEST, LARGE_PARTS)
        inbox.add(first)
    inbox.add(second)
    assert inbox.take() is not None
    inbox.begin(given, LARGE_MANIFEST, LARGE_PARTS)
    inbox.add(first)
    inbox.drop(given)
    inbox.add(second)
    assert inbox.take() is None


def test_a_part_may_be_overtaken_by_others_between_its_chunks() -> None:
    inbox, parts = Inbox("w"), [large(number) for number in range(MAX_ARRIVING)]
    for given, first, _ in parts:
        inbox.begin(given, LARGE_MANIFEST, LARGE_PARTS)
        inbox.add(first)
        assert inbox.take() is None
    assert [inbox.arriving(part_transfer(1, number)) for number in range(4)] == [each[0] for each in parts]
    with pytest.raises(Refused, match="4 parts on their way at once") as caught:
        inbox.begin(large(5)[0], LARGE_MANIFEST, LARGE_PARTS)
    assert caught.value.refusal.reason is Reason.SIZE
    for given, _, second in reversed(parts):
        inbox.add(second)
        complete = inbox.take()
        assert complete is not None
        assert complete[0] is given
        (payload,) = complete[1].finish()
        assert bytes(payload.data) == bytes(dense(*range(given.part, given.part + LARGE)).data)
        assert inbox.take() is None


def test_of_a_push_that_is_of_no_use_all_parts_are_dropped() -> None:
    inbox, parts = Inbox("w"), [large(0), large(1), large(2, seq=2)]
    for given, first, _ in parts:
        inbox.begin(given, LARGE_MANIFEST, LARGE_PARTS)
        inbox.add(first)
    inbox.drop_push(1)
    for _, _, second in parts[:2]:
        inbox.add(second)
        assert inbox.take() is None
    inbox.add(parts[2][2])
    assert inbox.take() is not None


def test_it_says_how_many_bytes_came_since_the_part_before_and_whether_without_a_pause() -> None:
    """What a part had got of the link before another overtook it came in the time of the other."""
    inbox, size = Inbox("w"), 4 * LARGE

    def taken() -> tuple[int, bool]:
        assert inbox.take() is not None
        return inbox.since()

    def begin(part: int, waited: bool) -> tuple[m.Chunk, m.Chunk]:
        given, *both = large(part, waited=waited)
        inbox.begin(given, LARGE_MANIFEST, LARGE_PARTS)
        inbox.add(both[0])
        return both[0], both[1]

    for waited in (False, True):
        inbox.add(begin(0, waited)[1])
        assert taken() == (size, waited)
    first, overtaken = begin(1, False)
    inbox.add(begin(2, True)[1])
    assert taken() == (size + len(first.data), False), "nothing was on its way before the first of them"
    inbox.add(overtaken)
    assert taken() == (size - len(first.data), True)
    inbox.add(begin(3, True)[1])
    assert taken() == (size, True)


def test_a_chunk_before_any_part_is_refused() -> None:
    with pytest.raises(Refused, match="the header of a part first"):
        Inbox("w").add(chunks(header(0, [dense(1)]), [dense(1)])[0])


# ---- what outlives streams


CHECKSUMS = {0: 11, 1: 22, 2: 33}


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


def send(arrivals: Arrivals, seq: int, *parts: int) -> None:
    """Parts arrive whole."""
    for part in parts:
        assert arrivals.wants(seq, part, 1)
        assert arrivals.store(seq, part, CHECKSUMS[part])


def handed_on(arrivals: Arrivals) -> list[int]:
    """Seqs in the order in which they are complete; each is decided on at once."""
    seqs: list[int] = []
    while (complete := arrivals.next(1)) is not None:
        given, parts = complete
        assert parts == frozenset(CHECKSUMS)
        arrivals.close(given.seq)
        seqs.append(given.seq)
    return seqs


@pytest.mark.parametrize("when", range(4))
def test_a_push_is_handed_on_with_its_last_part_wherever_its_commit_comes(when: int) -> None:
    arrivals = Arrivals("w", 4)
    for part in range(3):
        if part == when:
            arrivals.commit(commit(7))
        assert handed_on(arrivals) == []
        send(arrivals, 7, part)
    if when == 3:
        assert handed_on(arrivals) == []
        arrivals.commit(commit(7))
    assert handed_on(arrivals) == [7]
    assert (arrivals.through, arrivals.stored) == (7, ())


@pytest.mark.parametrize("before", range(4))
def test_an_abandoned_push_is_over_whatever_comes_of_it_before_or_after(before: int) -> None:
    """Before its parts, after half of them, and after the last."""
    arrivals = Arrivals("w", 0)
    send(arrivals, 1, *range(before))
    arrivals.close(1)
    assert arrivals.over(1)
    assert not any(arrivals.wants(1, part, 1) for part in range(3))
    assert not arrivals.store(1, 2, 33), "a part that was being scanned meanwhile"
    assert (list(arrivals.open), arrivals.stored, arrivals.next(1)) == ([], (), None)
    send(arrivals, 2, 0, 1, 2)
    arrivals.commit(commit(2))
    assert handed_on(arrivals) == [2]


def test_duplicates_of_parts_and_commits_are_of_no_use_and_do_no_harm() -> None:
    arrivals = Arrivals("w", 0)
    send(arrivals, 1, 0, 1)
    arrivals.commit(commit(1))
    arrivals.commit(commit(1))
    assert not arrivals.wants(1, 0, 1)
    assert arrivals.store(1, 0, 11), "two copies of it were being scanned"
    assert arrivals.stored == (m.Stored(seq=1, parts=(0, 1)),)
    send(arrivals, 1, 2)
    assert handed_on(arrivals) == [1]
    assert not arrivals.wants(1, 0, 1), "decided on"
    assert arrivals.over(1)


def test_a_part_that_was_refused_is_wanted_again_and_holds_up_its_push() -> None:
    arrivals = Arrivals("w", 0)
    send(arrivals, 1, 0, 2)
    assert arrivals.wants(1, 1, 1)  # and it is damaged: nothing is stored
    arrivals.commit(commit(1))
    assert handed_on(arrivals) == []
    send(arrivals, 1, 1)
    assert handed_on(arrivals) == [1]


def test_a_later_push_waits_for_an_earlier_one_whose_part_comes_again() -> None:
    arrivals = Arrivals("w", 0)
    send(arrivals, 1, 0, 1)
    arrivals.commit(commit(1))
    send(arrivals, 2, 0, 1, 2)
    arrivals.commit(commit(2))
    assert handed_on(arrivals) == []
    send(arrivals, 1, 2)
    assert handed_on(arrivals) == [1, 2]


def test_a_later_push_that_is_given_up_does_not_end_an_earlier_one() -> None:
    arrivals = Arrivals("w", 0)
    send(arrivals, 1, 0, 1)
    send(arrivals, 3, 0)
    arrivals.close(3)
    assert arrivals.over(3)
    assert not arrivals.over(1)
    assert arrivals.stored == (m.Stored(seq=1, parts=(0, 1)),)
    arrivals.commit(commit(1))
    send(arrivals, 1, 2)
    assert handed_on(arrivals) == [1]
    assert arrivals.over(2), "nothing had come of it when a later one was given up"


@pytest.mark.parametrize("checksums", [{**CHECKSUMS, 1: 23}, {0: 11, 1: 22}, {0: 22, 1: 11, 2: 33}])
def test_what_is_stored_has_to_be_what_was_committed(checksums: dict[int, int]) -> None:
    arrivals = Arrivals("w", 0)
    send(arrivals, 1, 0, 1, 2)
    arrivals.commit(commit(1, checksums))
    with pytest.raises(Refused) as caught:
        arrivals.next(1)
    assert caught.value.refusal.reason is Reason.CHECKSUM
    arrivals.forget(1)
    assert (handed_on(arrivals), arrivals.stored) == ([], (m.Stored(seq=1, parts=()),))
    send(arrivals, 1, 0, 1, 2)
    assert handed_on(arrivals) == [], "its commit has to come again as well"
    arrivals.commit(commit(1))
    assert handed_on(arrivals) == [1]


def test_a_push_without_parts_needs_only_its_commit() -> None:
    arrivals = Arrivals("w", 0)
    arrivals.commit(commit(5, {}))
    complete = arrivals.next(1)
    assert complete is not None
    assert complete == (commit(5, {}), frozenset())


@pytest.mark.parametrize("kind", ["part", "commit"])
def test_open_pushes_have_a_quota(kind: str) -> None:
    def begin(seq: int) -> None:
        if kind == "part":
            assert arrivals.wants(seq, 0, 1)
        else:
            arrivals.commit(commit(seq))

    arrivals = Arrivals("w", 0)
    for seq in range(1, MAX_OPEN + 1):
        begin(seq)
    with pytest.raises(Refused) as caught:
        begin(MAX_OPEN + 1)
    assert caught.value.refusal.reason is Reason.SIZE
    begin(3)
    arrivals.close(2)
    begin(MAX_OPEN + 1)


def test_why_a_push_was_refused_is_remembered_for_a_while() -> None:
    arrivals, why = Arrivals("w", 0), Refusal(reason=Reason.NON_FINITE, message="not finite")
    for seq in range(1, 100):
        assert arrivals.wants(seq, 0, 1)
        arrivals.close(seq, why)
    assert arrivals.refusal(99) is why
    assert [seq for seq in range(1, 100) if arrivals.refusal(seq)] == list(range(100 - MAX_OPEN, 100))


def test_the_digest_depends_on_which_part_has_which_checksum() -> None:
    checksums = {part: int(value) for part, value in enumerate(np.random.default_rng(1).integers(0, 99, 5))}
    assert digest(checksums) == digest(dict(reversed(checksums.items())))
    assert digest(checksums) != digest({**checksums, 0: checksums[1], 1: checksums[0]})


# ---- learning rates of pushes


@pytest.mark.parametrize(
    ("rates", "words"),
    [
        ((0.1,), "expected 2, one for each parameter group, or none, got 1"),
        ((0.1, 0.1, 0.1), "got 3"),
        ((0.1, float("nan")), "expected finite numbers of at least 0"),
        ((0.1, float("inf")), "expected finite numbers of at least 0"),
        ((-0.1, 0.1), "expected finite numbers of at least 0"),
    ],
)
def test_learning_rates_that_there_cannot_be_are_refused(rates: tuple[float, ...], words: str) -> None:
    arrivals = Arrivals("w", 0)
    for seq in (1, 2):
        assert arrivals.wants(seq, 0, 3)
    with pytest.raises(Refused, match=words) as caught:
        arrivals.check_rates(header(0, [], learning_rates=rates), 2)
    assert caught.value.refusal.reason is Reason.GROUP
    for part in range(2):
        arrivals.check_rates(header(part, [], learning_rates=(0.1, 0.0)), 2)
        arrivals.check_rates(header(part, [], seq=2), 2)
    for others in ((0.1, 0.3), ()):
        with pytest.raises(Refused, match="part 1 learning_rates: expected those of the push's other parts"):
            arrivals.check_rates(header(1, [], learning_rates=others), 2)
