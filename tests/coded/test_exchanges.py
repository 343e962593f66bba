"""Decisions on exchanges in coded mode, one at a time; `coded_histories` tries them together with all others.
`test_copies` has those on where the parameters are."""

from __future__ import annotations

from typing import Any

from coded_jobs import Job, some
from stepping import Refuse, core_of, state, step

from gradwire.coded.exchanges import MAX_DAMAGED
from gradwire.proto.messages import Decision, Exchanged
from gradwire.proto.refusal import Reason, Refusal
from gradwire.server.job import events as e


def refusal(actions: list[Any]) -> Refusal:
    (refused,) = some(actions, Refuse)
    return refused.refusal


def test_a_version_is_there_when_everybody_has_the_sum() -> None:
    job = Job(3)
    for name in "abc":
        job.send(name)
    for name in "ab":
        (answer,) = some(job.report(name), e.Decided)
        assert (answer.outcome.decision, answer.outcome.version) == (Decision.ACCEPTED, 1)
        assert job.core.state.version == 0
    actions = job.report("c")
    assert job.core.state.version == 1
    assert {assign.assignment.apply for assign in some(actions, e.Assign)} == {1}
    assert all(assign.has == assign.assignment.version for assign in some(actions, e.Assign))


def test_all_are_told_the_same_samples() -> None:
    job = Job(3)
    ranges = {assign.assignment.ranges for assign in job.assigned.values()}
    assert len(ranges) == 1
    assert sum(each.count for each in ranges.pop()) == 6
    assert [job.assigned[name].assignment.position for name in "abc"] == [0, 1, 2]


def test_blocks_by_speed_give_a_slow_worker_fewer_samples() -> None:
    """Each report stands for one sample, in one second or in three."""
    job = Job(3, redundancy=1, samples=800, blocks="speed", batch_size=14)
    seconds = {"a": 1.0, "b": 1.0, "c": 3.0}

    def sizes() -> tuple[int, ...]:
        assert job.mode.round is not None
        return job.mode.round.coding.sizes

    assert sizes() == ()  # no speed is known yet
    for _ in range(2):
        for name in "abc":
            job.send(name)
        for name in "abc":
            job.report(name, seconds=seconds[name])
        assert sizes() == (18, 18, 6)
    coding = {job.assigned[name].assignment.coding for name in "abc"}
    assert {each.sizes for each in coding if each is not None} == {(18, 18, 6)}
    # A block that is left out has the samples of its size.
    job.step(e.Left(worker="c", incarnation=1, failed=True, reason="told to"))
    assert job.mode.round is not None
    assert [sum(r.count for r in part.ranges) for part in job.mode.round.parts] == [18, 18]
    assert [sum(r.count for r in part.ranges) for part in job.mode.round.left_out] == [6]


def test_a_worker_that_was_slow_at_first_gets_its_samples_back() -> None:
    """Its first step takes so long that it would have no sample ever after."""
    job = Job(2, redundancy=1, samples=100_000, blocks="speed", batch_size=14)
    found: list[tuple[int, ...]] = []
    for turn in range(60):
        for name in "ab":
            job.send(name)
        for name in "ab":
            job.report(name, seconds=300.0 if turn == 0 and name == "b" else 1.0)
        assert job.mode.round is not None
        found.append(job.mode.round.coding.sizes)
    assert min(found[0]) == 0
    assert found[10] == found[-1] == (14, 14)


def test_even_blocks_have_no_sizes_however_long_workers_take() -> None:
    job = Job(3)
    for seconds in (1.0, 2.0):
        job.round(seconds=seconds)
    assert job.mode.round is not None
    assert job.mode.round.coding.sizes == ()


def test_a_packet_that_is_not_ones_own_is_refused_and_changes_nothing() -> None:
    job = Job(3)
    assert job.mode.round is not None
    before = state(job.core)
    (theirs, *_) = job.mode.round.plan.sent_by[1]
    for exchange, index in ((1, theirs), (1, 99), (2, 0)):
        begun = e.PacketStarted(worker="a", incarnation=1, exchange=exchange, index=index)
        why = refusal(job.step(begun))
        assert why.reason is Reason.PACKET
        assert "'a'" in why.message
    assert state(job.core) == before


def test_a_packet_of_an_exchange_that_is_over_goes_nowhere() -> None:
    job = Job(3)
    job.round()
    assert job.step(e.PacketStarted(worker="a", incarnation=1, exchange=1, index=0)) == []


def test_packets_are_for_coded_mode_only() -> None:
    core = core_of()
    core.step(e.Joined(worker="a", incarnation=1), 0.0)
    why = refusal(step(core, e.PacketStarted(worker="a", incarnation=1, exchange=1, index=0), 0.0))
    assert why.reason is Reason.PACKET


def test_damage_replaces_the_exchange_and_says_so() -> None:
    job = Job(3)
    why = Refusal(reason=Reason.CHECKSUM, message="crc32c differs")
    actions = job.step(e.PacketDamaged(worker="b", incarnation=1, exchange=1, refusal=why))
    (note,) = some(actions, e.Note)
    assert note.warning
    assert "rank 1 (b)" in note.text
    assert "crc32c differs" in note.text
    codings = [assign.assignment.coding for assign in some(actions, e.Assign)]
    assert len(codings) == 3
    for coding in codings:
        assert coding is not None
        assert (coding.exchange, len(coding.senders), coding.present) == (2, 3, (0, 1, 2))
    assert job.mode.status["uncoded_exchanges"] == 1
    job.round()
    assert job.core.state.version == 1


def test_who_damages_again_and_again_is_sent_away() -> None:
    job = Job(3)
    why = Refusal(reason=Reason.CHECKSUM, message="crc32c differs")
    for exchange in range(1, MAX_DAMAGED + 1):
        actions = job.step(e.PacketDamaged(worker="b", incarnation=1, exchange=exchange, refusal=why))
        assert not some(actions, e.Disconnect)
    actions = job.step(e.PacketDamaged(worker="b", incarnation=1, exchange=MAX_DAMAGED + 1, refusal=why))
    (gone,) = some(actions, e.Disconnect)
    assert (gone.worker, gone.final) == ("b", True)
    job.names = "ac"
    job.round()
    assert job.core.state.version == 1


def test_who_reports_without_having_sent_its_packets_does_not_keep_others_waiting() -> None:
    job = Job(3)
    (note,) = some(job.report("a"), e.Note)
    assert "has not sent all of its packets" in note.text
    assert job.assigned["b"].assignment.coding is not None
    assert job.assigned["b"].assignment.coding.exchange == 2


def test_who_is_lost_after_its_packets_are_through_is_not_missed() -> None:
    job = Job(3)
    job.send("a")
    actions = job.step(e.Left(worker="a", incarnation=1, failed=True, reason="told to"))
    assert not some(actions, e.Assign)
    for name in "bc":
        job.send(name)
        job.report(name)
    assert job.core.state.version == 1
    assert job.mode.status["uncoded_exchanges"] == 0


def test_without_redundancy_the_samples_of_who_is_lost_go_out_again() -> None:
    job = Job(3, redundancy=1)
    job.step(e.Left(worker="a", incarnation=1, failed=True, reason="told to"))
    job.names = "bc"
    actions = job.round()
    (closed,) = some(actions, e.ExchangeCompleted)
    assert closed.samples == 4
    (first, *_) = job.assigned["b"].assignment.ranges
    assert (first.start, first.count) == (0, 2)  # the block of a


def test_clipping_is_said_again_less_and_less_often() -> None:
    job = Job(1, redundancy=1, samples=1000)
    said: list[int] = []
    for number in range(1, 21):
        assignment = job.assigned["a"].assignment
        job.seq["a"] += 1
        exchanged = Exchanged(crc32c=0, clipped=5)
        actions = job.step(
            e.Pushed(
                worker="a",
                incarnation=1,
                seq=job.seq["a"],
                samples=1,
                assignment=assignment.id,
                base_version=assignment.version,
                exchanged=exchanged,
            )
        )
        said += [number for note in some(actions, e.Note) if "were clipped" in note.text]
    assert said == [1, 2, 4, 8, 16]
    assert job.mode.status["clipped_elements"] == 100


def test_those_who_have_sent_are_not_waited_for() -> None:
    job = Job(3)
    job.send("a")
    job.send("b")
    assert job.mode.waiting(job.now).ranks == (2,)
    text = job.core.waiting(job.now).text
    assert "rank 2" in text
    assert "rank 0" not in text


def test_members_that_computed_a_block_differently_exchange_whole_blocks_instead() -> None:
    job = Job(3)
    assert not job.send("a")
    actions = job.send("b", block0=99)  # which a has, too
    (note,) = some(actions, e.Note)
    assert note.warning
    assert note.text.startswith(
        "version 1: rank 0 (a) and rank 1 (b) computed different gradients of block 0"
    )
    assert "sent again, uncoded" in note.text
    assert job.core.state.version == 0
    assert job.mode.status["uncoded_exchanges"] == 1
    round_ = job.mode.round
    assert round_ is not None
    for block, packet in enumerate(round_.plan.packets):  # from one member to both others
        assert packet.terms == ((block, 0),)
        assert sorted((packet.sender, *packet.targets)) == [0, 1, 2]
    actions = job.round()
    assert job.core.state.version == 1
    assert {assign.assignment.apply for assign in some(actions, e.Assign)} == {2}


def test_a_block_that_differs_at_a_member_that_is_gone_counts_too() -> None:
    job = Job(3)
    job.send("a", block0=99)
    job.step(e.Left(worker="a", incarnation=1, failed=True, reason="told to"))
    (note,) = some(job.send("b"), e.Note)
    assert "rank 0 (a) and rank 1 (b) computed different gradients" in note.text
    job.names = "bc"
    job.round()
    assert job.core.state.version == 1


def test_blocks_that_differ_at_every_step_are_said_less_often_and_with_the_remedy() -> None:
    job = Job(3, samples=6000)
    said: dict[int, str] = {}
    for step_ in range(1, 21):
        job.send("a")
        for note in some(job.send("b", block0=99), e.Note):
            said[step_] = note.text
        job.round()
        assert job.core.state.version == step_
    assert list(said) == [1, 2, 4, 8, 16]
    assert "coded:redundancy=1" not in said[2]
    assert "this is step 4 in a row" in said[4]
    assert "seed the augmentation, or use --mode coded:redundancy=1" in said[4]
    job.round()  # once without
    job.send("a")
    (note,) = some(job.send("b", block0=99), e.Note)
    assert "in a row" not in note.text


def test_packets_without_the_checksums_of_their_blocks_are_refused() -> None:
    job = Job(3)
    assert job.mode.round is not None
    before = state(job.core)
    (own, *_) = job.mode.round.plan.sent_by[0]
    why = refusal(job.step(e.PacketStarted(worker="a", incarnation=1, exchange=1, index=own)))
    assert why.reason is Reason.PACKET
    assert "2 checksums" in why.message
    assert state(job.core) == before


def test_redundancy_is_what_the_members_can_have() -> None:
    job = Job(3, redundancy=5)
    assert job.mode.round is not None
    assert job.mode.round.coding.redundancy == 2
    alone = Job(1, redundancy=5)
    assert alone.mode.round is not None
    assert alone.mode.round.coding.redundancy == 1
    alone.round()
    assert alone.core.state.version == 1


def test_auto_chooses_redundancy_where_exchanging_takes_long() -> None:
    slow = Job(3, redundancy=None)
    for _ in range(6):
        slow.round(seconds=0.1, after=1.0)
    assert slow.mode.round is not None
    assert slow.mode.round.coding.redundancy == 2
    fast = Job(3, redundancy=None)
    for _ in range(6):
        fast.round(seconds=0.1, after=0.04)
    assert fast.mode.round is not None
    assert fast.mode.round.coding.redundancy == 1
