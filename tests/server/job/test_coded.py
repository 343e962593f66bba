"""Decisions of coded mode, one at a time; `coded_histories` tries them all together."""

from __future__ import annotations

from typing import Any, TypeVar

from stepping import Refuse, core_of, state, step

from gradwire.proto.messages import Decision, Exchanged, Phase
from gradwire.proto.refusal import Reason, Refusal
from gradwire.server.job import events as e
from gradwire.server.job.modes.copies import DRIFT_VERSIONS
from gradwire.server.job.modes.exchanges import MAX_DAMAGED, Coded

T = TypeVar("T")


class Job:
    """A job of workers a, b, c, … that are ready, and what it wants done."""

    def __init__(self, workers: int, redundancy: int | None = 2, samples: int = 80, **rules: Any) -> None:
        self.names = "abcdefgh"[:workers]
        mode = f"coded:redundancy={redundancy or 'auto'}"
        self.core = core_of(mode, min_workers=workers, **{"batch_size": 2, **rules})
        self.now = 0.0
        self.assigned: dict[str, e.Assign] = {}
        self.seq = dict.fromkeys(self.names, 0)
        for name in self.names:
            self.step(e.Joined(worker=name, incarnation=1))
        self.step(e.Initialized(worker="a", incarnation=1, fingerprint=b"", train_samples=samples))
        for name in self.names:
            self.come(name)

    @property
    def mode(self) -> Coded:
        assert isinstance(self.core.mode, Coded)
        return self.core.mode

    def step(self, event: e.Event[Any], after: float = 0.0) -> list[Any]:
        self.now += after
        actions: list[Any] = step(self.core, event, self.now)
        for action in actions:
            if isinstance(action, e.Assign):
                self.assigned[action.worker] = action
        return actions

    def come(self, name: str, version: int | None = 0, assigned: int = 0) -> list[Any]:
        return [
            *self.step(e.Attached(worker=name, incarnation=1)),
            *self.step(
                e.Prepared(worker=name, incarnation=1, fingerprint=b"", version=version, assigned=assigned)
            ),
        ]

    def send(self, name: str, **differing: int) -> list[Any]:
        """All packets of a worker. differing: checksums of blocks that are not what all others have."""
        assignment = self.assigned[name].assignment
        assert assignment.coding is not None
        assert self.mode.round is not None
        for index in self.mode.round.plan.sent_by[assignment.position]:
            exchange = assignment.coding.exchange
            terms = self.mode.round.plan.packets[index].terms if self.mode.round.compares else ()
            checksums = [differing.get(f"block{block}", block) for block, _ in terms]
            packet: dict[str, Any] = {
                "worker": name,
                "incarnation": 1,
                "exchange": exchange,
                "index": index,
            }
            self.step(e.PacketBegun(**packet, checksums=checksums))
            actions = self.step(e.PacketRelayed(**packet))
            if some(actions, e.Assign):  # another exchange has replaced it
                return actions
        return []

    def report(self, name: str, crc32c: int = 0, seconds: float = 0.0, after: float = 0.0) -> list[Any]:
        assignment = self.assigned[name].assignment
        self.seq[name] += 1
        return self.step(
            e.Pushed(
                worker=name,
                incarnation=1,
                seq=self.seq[name],
                assignment=assignment.id,
                base_version=assignment.version,
                samples=1,
                exchanged=Exchanged(crc32c=crc32c, computing_seconds=seconds),
            ),
            after,
        )

    def copied(self, name: str, version: int) -> list[Any]:
        """The snapshot that was asked for comes, and is taken over."""
        (take,) = some(self.step(e.CopyArrived(worker=name, incarnation=1, version=version)), e.TakeCopy)
        assert take.key == (name, 1, version)
        return self.step(e.Copied(version=version))

    def round(self, checksums: str = "", **timing: float) -> list[Any]:
        """A whole one; returns what follows from the last report."""
        for name in self.names:
            self.send(name)
        actions: list[Any] = []
        for place, name in enumerate(self.names):
            actions = self.report(name, int(checksums[place]) if checksums else 0, **timing)
        return actions


def some(actions: list[Any], kind: type[T]) -> list[T]:
    return [action for action in actions if isinstance(action, kind)]


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
        assert job.core.version == 0
    actions = job.report("c")
    assert job.core.version == 1
    assert {assign.assignment.apply for assign in some(actions, e.Assign)} == {1}
    assert all(assign.has == assign.assignment.version for assign in some(actions, e.Assign))


def test_all_are_told_the_same_samples() -> None:
    job = Job(3)
    ranges = {assign.assignment.ranges for assign in job.assigned.values()}
    assert len(ranges) == 1
    assert sum(each.count for each in ranges.pop()) == 6
    assert [job.assigned[name].assignment.position for name in "abc"] == [0, 1, 2]


def test_a_packet_that_is_not_ones_own_is_refused_and_changes_nothing() -> None:
    job = Job(3)
    assert job.mode.round is not None
    before = state(job.core)
    (theirs, *_) = job.mode.round.plan.sent_by[1]
    for exchange, index in ((1, theirs), (1, 99), (2, 0)):
        begun = e.PacketBegun(worker="a", incarnation=1, exchange=exchange, index=index)
        why = refusal(job.step(begun))
        assert why.reason is Reason.PACKET
        assert "'a'" in why.message
    assert state(job.core) == before


def test_a_packet_of_an_exchange_that_is_over_goes_nowhere() -> None:
    job = Job(3)
    job.round()
    assert job.step(e.PacketBegun(worker="a", incarnation=1, exchange=1, index=0)) == []


def test_packets_are_for_coded_mode_only() -> None:
    core = core_of()
    core.step(e.Joined(worker="a", incarnation=1), 0.0)
    why = refusal(step(core, e.PacketBegun(worker="a", incarnation=1, exchange=1, index=0), 0.0))
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
    assert job.core.uncoded_exchanges == 1
    job.round()
    assert job.core.version == 1


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
    assert job.core.version == 1


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
    assert job.core.version == 1
    assert job.core.uncoded_exchanges == 0


def test_without_redundancy_the_samples_of_who_is_lost_go_out_again() -> None:
    job = Job(3, redundancy=1)
    job.step(e.Left(worker="a", incarnation=1, failed=True, reason="told to"))
    job.names = "bc"
    actions = job.round()
    (closed,) = some(actions, e.Closed)
    assert closed.samples == 4
    (first, *_) = job.assigned["b"].assignment.ranges
    assert (first.start, first.count) == (0, 2)  # the block of a


def test_who_joins_gets_a_copy_that_the_round_waits_for() -> None:
    job = Job(2, redundancy=1)
    job.round()
    job.step(e.Joined(worker="z", incarnation=1))
    assert not some(job.come("z", version=None), e.Assign)
    actions = job.round()
    assert not some(actions, e.Assign)
    (request,) = some(actions, e.RequestCopy)
    assert (request.worker, request.version, request.apply) == ("a", 2, 2)
    assert "the copy of version 2 is waited for" in job.core.waiting(job.now).text
    assert job.mode.wants_copy("a", 2)
    assert not job.mode.wants_copy("b", 2)
    actions = job.copied("a", 2)
    has = {assign.worker: assign.has for assign in some(actions, e.Assign)}
    assert has == {"a": 2, "b": 2, "z": None}


def test_who_was_asked_for_the_copy_and_is_lost_is_replaced() -> None:
    job = Job(2, redundancy=1)
    job.round()
    job.step(e.Joined(worker="z", incarnation=1))
    job.come("z", version=None)
    job.round()
    actions = job.step(e.Left(worker="a", incarnation=1, failed=True, reason="told to"))
    assert [request.worker for request in some(actions, e.RequestCopy)] == ["b"]


def test_a_copy_that_has_arrived_counts_whatever_becomes_of_who_sent_it() -> None:
    job = Job(1, redundancy=1)
    job.round()
    job.step(e.Joined(worker="z", incarnation=1))
    job.come("z", version=None)
    job.round()
    arrived = e.CopyArrived(worker="a", incarnation=1, version=2)
    assert len(some(job.step(arrived), e.TakeCopy)) == 1
    job.step(e.Left(worker="a", incarnation=1, failed=True, reason="told to"))
    assert job.core.version == 2
    (assign,) = some(job.step(e.Copied(version=2)), e.Assign)
    assert (assign.worker, assign.has, assign.assignment.version) == ("z", None, 2)


def test_who_leaves_may_hand_over_the_only_copy() -> None:
    job = Job(1, redundancy=1)
    job.round()
    job.round()
    arrived = e.CopyArrived(worker="a", incarnation=1, version=1, leaving=True)
    assert len(some(job.step(arrived), e.TakeCopy)) == 1
    job.step(e.Left(worker="a", incarnation=1, failed=False, reason="told to"))
    assert job.core.version == 2  # not before the copy is in place
    (note, *_) = some(job.step(e.Copied(version=1)), e.Note)
    assert "1 version older" in note.text
    assert job.core.version == 3


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
    assert job.core.clipped == 100


def test_those_who_have_sent_are_not_waited_for() -> None:
    job = Job(3)
    job.send("a")
    job.send("b")
    assert job.mode.waiting(job.now).ranks == (2,)
    text = job.core.waiting(job.now).text
    assert "rank 2" in text
    assert "rank 0" not in text


def test_a_snapshot_that_was_not_asked_for_is_not_taken() -> None:
    job = Job(2, redundancy=1)
    job.round()
    assert job.step(e.CopyArrived(worker="a", incarnation=1, version=1)) == [e.Drop(key=e.CopyKey("a", 1, 1))]


def test_everybody_lost_means_back_to_the_copy() -> None:
    job = Job(2, redundancy=1)
    job.round()
    job.round()
    for name in "ab":
        job.step(e.Left(worker=name, incarnation=1, failed=True, reason="told to"))
    assert job.core.version == 3
    job.step(e.Joined(worker="z", incarnation=1))
    actions = job.come("z", version=None)
    (assign,) = some(actions, e.Assign)
    assert (assign.has, assign.assignment.version, assign.assignment.apply) == (None, 3, 0)
    (first, *_) = assign.assignment.ranges
    assert first.start == 0


def outage(job: Job) -> list[Any]:
    """Nobody is heard of until all leases are over."""
    return job.step(e.Tick(), after=11.0)


def test_who_joins_waits_for_those_that_are_away_with_the_current_version() -> None:
    job = Job(2, redundancy=1, samples=6000)
    job.round()
    job.round()
    outage(job)
    job.step(e.Joined(worker="z", incarnation=1), after=100.0)
    assert not some(job.come("z", version=None), e.Assign)
    text = job.core.waiting(job.now).text
    assert "version 2 is waited for" in text
    assert "(a, gone), rank 1 (b, gone)" in text
    assert "waited for 30 s, training goes back to the server's copy, version 0" in text
    for _ in range(5):
        job.step(e.Heard(worker="z", incarnation=1), after=5.0)
        assert not job.step(e.Tick())
    actions = job.come("a", version=2, assigned=job.assigned["a"].assignment.id)
    assert [request.worker for request in some(actions, e.RequestCopy)] == ["a"]
    assert job.core.version == 2
    actions = job.copied("a", 2)
    assert {assign.worker: assign.has for assign in some(actions, e.Assign)} == {"a": 2, "z": None}


def test_when_nobody_comes_back_with_the_current_version_training_goes_on_from_the_copy() -> None:
    job = Job(2, redundancy=1, samples=6000)
    job.round()
    job.round()
    outage(job)
    job.step(e.Joined(worker="z", incarnation=1))
    job.come("z", version=None)
    actions: list[Any] = []
    while not some(actions, e.Relabel):
        job.step(e.Heard(worker="z", incarnation=1), after=5.0)
        actions = job.step(e.Tick())
    assert 10.0 + 30.0 < job.now <= 10.0 + 30.0 + 6.0
    (assign,) = some(actions, e.Assign)
    assert (assign.worker, assign.has, assign.assignment.version) == ("z", None, 3)
    (first, *_) = assign.assignment.ranges
    assert first.start == 0


def test_those_that_came_back_as_another_incarnation_are_not_waited_for() -> None:
    job = Job(1, redundancy=1, samples=6000)
    job.round()
    outage(job)
    job.step(e.Joined(worker="a", incarnation=2))
    job.step(e.Attached(worker="a", incarnation=2))
    prepared = e.Prepared(worker="a", incarnation=2, fingerprint=b"", version=None, assigned=0)
    (assign,) = some(job.step(prepared), e.Assign)
    assert (assign.has, assign.assignment.version) == (None, 2)


def test_replicas_that_drift_are_named_and_brought_together_when_the_epoch_ends() -> None:
    job = Job(3, samples=12)
    (note,) = some(job.round("001"), e.Note)
    assert "replicas of rank 2 (c) differ from that of rank 0 (a)" in note.text
    assert job.core.drifting == 1
    actions = job.round("001")  # the epoch is over
    assert not some(actions, e.Assign)
    assert len(some(actions, e.RequestCopy)) == 1
    actions = job.copied("a", 2)
    assert {assign.worker: assign.has for assign in some(actions, e.Assign)} == {"a": 2, "b": 2, "c": None}
    job.round("000")
    assert job.core.drifting == 0


def test_drift_does_not_go_on_for_ever() -> None:
    job = Job(2, redundancy=1, samples=10_000)
    rounds = 0
    while not some(job.round("01"), e.RequestCopy):
        rounds += 1
        assert rounds <= DRIFT_VERSIONS
    assert rounds > DRIFT_VERSIONS / 2


def test_members_that_computed_a_block_differently_exchange_whole_blocks_instead() -> None:
    job = Job(3)
    assert not job.send("a")
    actions = job.send("b", block0=99)  # which a has, too
    (note,) = some(actions, e.Note)
    assert note.warning
    assert note.text.startswith(
        "version 1: rank 0 (a) and rank 1 (b) computed different gradients of block 0"
    )
    assert "sent uncoded instead" in note.text
    assert job.core.version == 0
    assert job.core.uncoded_exchanges == 1
    round_ = job.mode.round
    assert round_ is not None
    for block, packet in enumerate(round_.plan.packets):  # from one member to both others
        assert packet.terms == ((block, 0),)
        assert sorted((packet.sender, *packet.targets)) == [0, 1, 2]
    actions = job.round()
    assert job.core.version == 1
    assert {assign.assignment.apply for assign in some(actions, e.Assign)} == {2}


def test_a_block_that_differs_at_a_member_that_is_gone_counts_too() -> None:
    job = Job(3)
    job.send("a", block0=99)
    job.step(e.Left(worker="a", incarnation=1, failed=True, reason="told to"))
    (note,) = some(job.send("b"), e.Note)
    assert "rank 0 (a) and rank 1 (b) computed different gradients" in note.text
    job.names = "bc"
    job.round()
    assert job.core.version == 1


def test_blocks_that_differ_at_every_step_are_said_less_often_and_with_the_remedy() -> None:
    job = Job(3, samples=6000)
    said: dict[int, str] = {}
    for step_ in range(1, 21):
        job.send("a")
        for note in some(job.send("b", block0=99), e.Note):
            said[step_] = note.text
        job.round()
        assert job.core.version == step_
    assert list(said) == [1, 2, 4, 8, 16]
    assert "coded:redundancy=1" not in said[2]
    assert "as in 4 steps in a row" in said[4]
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
    why = refusal(job.step(e.PacketBegun(worker="a", incarnation=1, exchange=1, index=own)))
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
    assert alone.core.version == 1


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


def test_the_job_ends_with_a_copy_of_the_last_version() -> None:
    job = Job(2, redundancy=1, samples=4, epochs=1)
    actions = job.round()
    phases = [job.core.phase]
    assert len(some(actions, e.RequestCopy)) == 1
    job.copied("a", 1)
    phases.append(job.core.phase)
    actions = job.step(e.Evaluated(worker="a", incarnation=1, version=1, epoch=1, metrics={}))
    phases.append(job.core.phase)
    assert phases == [Phase.RUNNING, Phase.FINISHING, Phase.FINISHED]
    assert len(some(actions, e.Finish)) == 1


def come_back(job: Job, name: str, version: int) -> None:
    job.step(e.Joined(worker=name, incarnation=1))
    job.come(name, version=version, assigned=job.assigned[name].assignment.id)


def test_an_outage_longer_than_the_lease_loses_nothing_if_members_come_back_with_the_version() -> None:
    """Finding F3: training went back to the last copy, here version 0."""
    job = Job(3, samples=600)
    for _ in range(50):
        job.round()
    progress = job.core.samples.progress
    actions = job.step(e.Tick(), after=10.5)
    assert [lost.name for lost in some(actions, e.Lost)] == ["rank 0 (a)", "rank 1 (b)", "rank 2 (c)"]
    assert job.core.version == 50
    assert "rank 0 (a, gone)" in job.core.waiting(job.now).text
    come_back(job, "b", 50)
    come_back(job, "a", 50)
    come_back(job, "c", 50)
    assert job.core.version == 50
    assert {job.assigned[name].assignment.version for name in "abc"} == {50}
    assert job.core.samples.progress == progress


def test_members_that_had_not_taken_the_last_step_come_back_with_its_sum() -> None:
    job = Job(2, redundancy=1, samples=600)
    job.round()
    job.step(e.Tick(), after=10.5)
    come_back(job, "a", 0)
    assert job.core.version == 1
    assert job.assigned["a"].assignment.apply == 1
