"""The push ledger: the server's record of each push, from its first header until it is applied.

A push is identified by its key (worker, incarnation, seq). `seq` grows and no value is used twice, so a copy
of a push is always recognised. A push belongs to its member, on any stream; parts that are still arriving
belong to the stream (`arriving`) and end with it.

    | state     | meaning                                                         | next              |
    |-----------|-----------------------------------------------------------------|-------------------|
    | open      | Parts arrive, and are journaled and stored. Control does not    | committed,        |
    |           | know of the push.                                               | unwanted,         |
    |           |                                                                 | abandoned,        |
    |           |                                                                 | refused           |
    | committed | The worker has declared the push complete. Parts may still be   | accepted, stale,  |
    |           | missing, because a damaged part comes again.                    | redundant,        |
    |           |                                                                 | refused, open,    |
    |           |                                                                 | unwanted,         |
    |           |                                                                 | abandoned         |
    | unwanted  | Control would refuse the push now. Its parts are dropped, and   | stale, redundant, |
    |           | the worker was told (`Unwanted`) to send only the commit.       | refused, open,    |
    |           |                                                                 | abandoned         |
    | accepted  | The outcome named the version that will contain the push.       | applied           |
    | applied   | An `Apply` order has taken the parts.                           |                   |
    | stale     | Control refused: the round has closed, or there is a new plan.  |                   |
    |           | The worker adds the push to its residual.                       |                   |
    | redundant | Control refused: others have pushed the same gradient. The      |                   |
    |           | worker forgets the step.                                        |                   |
    | abandoned | The worker gave the push up, because a gradient is not finite.  |                   |
    |           | Its next push answers the same assignment.                      |                   |
    | refused   | The push is invalid, and the worker ends with the reason.       |                   |

One push asks the ledger six times: `arrive` with each header, `store` with each whole part, `commit`,
`decided` once control has decided, `next` for later pushes that waited, and `take` when a version contains
it. The answer `Due` is a push whose worker hears something now.

If the stream breaks, the push stays as it is. The next stream of the incarnation reports the stored parts
(`stored`), and the worker sends the missing ones and the commit. Copies change nothing: a stored part is not
received again, and a repeated commit gets the outcome of the first. If the stored parts differ from the
committed ones, or if control wants an unwanted push after all, the push is open and empty again, and the
worker sends all of it.

If the worker dies between the last part and the commit, the push is whole but open, and open pushes do not
count. When the lease ends, control gives the samples to another member, and `forget_gone` drops the parts.
The same process may be alive and return: within its lease it sends the commit alone, later the whole push, if
control gives it the samples back. A new process has another incarnation, which never completes this push. The
same holds for a worker that dies after the commit while a part is missing. An accepted push stays, even if
its worker is lost. A round whose parts are stepped one by one keeps the parts of the open push that were
final when the worker died (`final_parts`), and a substitute pushes the others.

Must not happen:

- A part reaches the shard, or its worker receives `Stored`, before the journal has the part (`store`).
- Control gets a push before the member's earlier pushes are over (`next`).
- A push changes its state in a way that `push_record` does not list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...compressors import Payload
from ...proto import messages as m
from ...proto.refusal import Reason, Refusal, Refused, refusal, refused
from ..durable.recorder import Member, Recorder, Stored
from ..job import events as e
from ..job import refusals
from ..job.core import Core
from ..job.events import PushKey
from ..shard.mean import Push
from ..shard.shard import Shard
from .final_parts import FinalParts
from .outbox import WorkerStream
from .push_record import UNDECIDED, Account, Due, PushLife, PushRecord, pushed

MAX_OPEN = 16  # most undecided pushes of a member


class PushLedger:
    """The pushes of all members. The conductor owns it, on its event loop; streams and recovery fill it."""

    def __init__(
        self,
        core: Core,
        shard: Shard,
        streams: Mapping[str, WorkerStream],
        recorder: Recorder,
        final: FinalParts,
        happen: Callable[[e.RatesReceived], None],
    ) -> None:
        """
        Args:
            shard: gets each stored part, and drops those of pushes that end.
            streams: streams of the connected workers, by worker; it changes as they connect.
            recorder: journals each part, and each end of a push that control does not decide.
            final: final parts of the open round, and of pushes that count in part.
            happen: has control decide on an event; raises Refused."""
        self.core, self._shard, self._streams, self._recorder = core, shard, streams, recorder
        self._final, self._happen = final, happen
        self._accounts: dict[Member, Account] = {}

    # ---- the life of a push

    def arrive(self, stream: WorkerStream, part: m.PartHeader) -> bool:
        """Begin to receive a part. Return True if its bytes are needed; otherwise they are ignored. Raises
        Refused if the header does not fit the job, the plan, the manifest or the push's earlier headers, or
        the member has too many undecided pushes."""
        known, key = self._shard.reported, PushKey(*stream.id, part.seq)
        if not self.core.mode.pushes_parts:
            raise Refused(refusals.not_of_mode(stream.worker, part.seq, coded=True))
        if known.manifest is None:
            raise Refused(refusals.not_initialized(stream.worker, f"push {part.seq}"))
        push = None if self._is_closed(key) else self._opened(key)
        if push is not None:
            push.assignment = part.assignment
            late = part.plan < known.plan.number or self.core.state.unwanted(*stream.id, part.assignment)
            needed = part.part not in push.checksums and push.life is not PushLife.UNWANTED
            if needed and not late:
                push.take_rates(stream.worker, part, max(1, len(known.manifest.groups)))
                stream.arriving.begin(part, known.manifest, known.plan, known.coordinates)
                return True
            if needed or push.life is PushLife.UNWANTED:  # `Unwanted` may have been lost with an old stream
                self._stop(stream, key, push)
        stream.arriving.drop(part)
        return False

    def store(
        self, stream: WorkerStream, part: m.PartHeader, checksum: int, payloads: Sequence[Payload]
    ) -> Due | None:
        """Store a whole and valid part: first in the journal, then here and in an open round. A copy of a
        stored part, and a part that is no longer needed, change nothing.

        Args:
            checksum: crc32c of the part's bytes.
            payloads: decoded payloads of the part, end to end.

        Returns:
            The member's push that is due now.

        Raises:
            Refused: control refuses the learning rates of the push.
            JournalError: the part cannot be journaled; nothing has changed.
        """
        key = PushKey(*stream.id, part.seq)
        push = self._undecided(key)
        if push is not None and push.life is not PushLife.UNWANTED and part.part not in push.checksums:
            rates, first = push.rates or (), not push.checksums
            if first and (rates or self.core.state.rules.script):
                named: dict[str, Any] = {"seq": part.seq, "assignment": part.assignment}
                self._happen(e.RatesReceived(*stream.id, **named, learning_rates=rates))
            # The first record of a push has its rates, for its first header may have come with a later part.
            part = replace(part, learning_rates=rates if first else ())
            self._recorder.part(stream.id, part, checksum, payloads)
            if self._final.stepping:  # a step cannot be undone, so the record has to be on the disk first
                self._recorder.sync()
            self._put(key, push, part, checksum, payloads)
        return self.next(stream)

    def _put(
        self, key: PushKey, push: PushRecord, part: m.PartHeader, checksum: int, payloads: Sequence[Payload]
    ) -> None:
        """Add a part to its push, and hand it to the shard."""
        push.checksums[part.part], push.payloads[part.part] = checksum, payloads
        self._shard.put(key, part.part, payloads, part.assignment, push.rates or ())

    def commit(self, stream: WorkerStream, commit: m.Commit, fault: Refusal | None = None) -> Due | None:
        """Record that the worker has declared a push complete. Return the member's push that is due now, or
        the closed push if this is a copy of its commit. Raises Refused (SIZE) if the member has too many
        undecided pushes. fault: reason why it is invalid, which refuses the push; None for a valid one. A
        copy of the commit of a closed push is not judged again."""
        key = PushKey(*stream.id, commit.seq)
        if self._is_closed(key):
            account, member = self._account(stream.id), self.core.state.roster.get(stream.id)
            known = account.refusals.get(commit.seq)
            if known is None and member is not None and commit.seq > member.last_seq:
                # Control knows no abandoned push, so this commit is out of sequence.
                why = refusals.sequence(stream.worker, commit.seq, account.through + 1)
                return Due(pushed(key, commit), why)
            return Due(pushed(key, commit), known, repeated=True)
        if fault is not None:
            self.refuse(key, fault)
            return Due(pushed(key, commit), fault)
        push = self._opened(key)
        push.commit, push.assignment = commit, commit.assignment
        if push.life is not PushLife.UNWANTED:
            push.become(PushLife.COMMITTED)
        return self.next(stream)

    def next(self, stream: WorkerStream) -> Due | None:
        """Return the member's first undecided push if its worker is due an answer.

        A push needs its commit and all parts that the commit counts. A push that is unwanted, or of another
        plan, needs no parts."""
        undecided = self._account(stream.id).undecided
        if not undecided or stream.outbox.ended_with is not None:
            return None
        seq, push = next(iter(undecided.items()))
        key, commit, worker = PushKey(*stream.id, seq), push.commit, stream.worker
        if commit is None:
            return None
        due = Due(pushed(key, commit, push.rates or ()))
        if push.life is PushLife.UNWANTED:
            if self.core.state.unwanted(*stream.id, commit.assignment):
                return due
            # The member was assigned these samples again, so its push counts after all.
            self.start_over(key)
            return replace(due, refusal=refusals.given_up(worker, seq))
        if commit.parts and commit.plan != self.core.state.plan:
            return due
        if len(push.checksums) < commit.parts:
            return None
        if push.differs(commit):
            self.start_over(key)
            limit, where = f"{commit.parts} parts with digest {commit.digest:08x}", f"push {seq}"
            differs = refusal(Reason.CHECKSUM, worker=worker, field=where, limit=limit, value="other parts")
            return replace(due, refusal=differs)
        why = self._why_other_parts(worker, commit, frozenset(push.checksums))
        if why is not None:
            self.refuse(key, why)
        return replace(due, refusal=why)

    def _why_other_parts(self, worker: str, commit: m.Commit, parts: frozenset[int]) -> Refusal | None:
        """Return the refusal of parts that are not those of the assignment; None if they are."""
        member = self.core.state.roster.members.get(worker)
        work = member.work if member is not None else None
        if not commit.parts or work is None or work.id != commit.assignment:
            return None
        plan, assigned = self._shard.reported.plan, work.assignment
        substituted = frozenset(self._final.asked(work.id))
        expected = substituted or plan.slice(assigned.slice, max(1, assigned.slices))
        if parts == expected or (not substituted and len(parts) == len(plan.parts)):
            return None
        return refusals.parts(worker, commit.seq, len(parts), len(expected), assigned)

    def decided(
        self, key: PushKey, outcome: m.Outcome, *, repeated: bool
    ) -> tuple[list[Payload], tuple[int, ...]]:
        """Record control's decision. The parts of an accepted push wait for its `Apply`; those of a refused
        push are dropped.

        Returns:
            All payloads that the push had stored; and the numbers of its parts that a version contains, if it
            was refused after these had been stepped.
        """
        account, push = self._account(key[:2]), self._undecided(key)
        accepted = outcome.decision is m.Decision.ACCEPTED
        counted = () if accepted else self._final.of(key)
        account.through = max(account.through, key.seq)
        if push is None:
            return [], counted
        if push.life is PushLife.OPEN:  # during recovery, where the decision's record holds the commit
            push.become(PushLife.COMMITTED)
        if accepted and not repeated:
            push.become(PushLife.ACCEPTED)
        else:
            push.become_refused(outcome.refusal)
        if push.life is not PushLife.ACCEPTED or not push.payloads:
            del account.pushes[key.seq]
        return [each for part in push.payloads.values() for each in part], counted

    def take(self, order: e.Apply) -> tuple[list[Push], Sequence[float]]:
        """Return the parts of the pushes that an order names, in its order, and their learning rates; remove
        the pushes from the ledger. If the order ends a round, stop the pushes that are late by then."""
        found: list[Push] = []
        rates: Sequence[float] = ()
        self._final.close_round(order)
        for each in order.contributions:
            if not each.samples:
                found.append({})
                continue
            push = self._account(each.key[:2]).pushes.pop(each.key.seq)
            push.become(PushLife.APPLIED)
            rates = rates or push.rates or ()
            found.append(push.payloads)
        if order.base_version is None:
            self._stop_late_pushes()
        return found, rates

    # ---- ends without control

    def abandon(self, key: PushKey) -> None:
        """Drop a push that its worker gives up, unless it is closed."""
        if not self._is_closed(key):
            self._end(key, PushLife.ABANDONED)

    def refuse(self, key: PushKey, refusal: Refusal) -> None:
        """Drop an invalid push, unless it is closed, and keep the reason for copies of its commit."""
        if self._is_closed(key):  # if accepted, it may still be waiting to be applied
            return
        self._end(key, PushLife.REFUSED, refusal)
        refusals_ = self._account(key[:2]).refusals
        refusals_[key.seq] = refusal
        while len(refusals_) > MAX_OPEN:
            del refusals_[next(iter(refusals_))]

    def _end(self, key: PushKey, life: PushLife, refusal: Refusal | None = None) -> None:
        """Close a push without control: journal the end, drop the parts, and remove the record."""
        self._recorder.closed(key[:2], key.seq, refusal, again=False)
        account, push = self._account(key[:2]), self._undecided(key)
        if push is not None:
            push.become(life)
            del account.pushes[key.seq]
        account.through = max(account.through, key.seq)
        self._shard.drop(key)

    def start_over(self, key: PushKey) -> None:
        """Forget the parts and the commit of an undecided push, which its worker sends again from the
        start."""
        self._recorder.closed(key[:2], key.seq, None, again=True)
        self._forget(key)

    def _forget(self, key: PushKey) -> None:
        """Make an undecided push open, without parts and commit."""
        push = self._opened(key)
        push.become(PushLife.OPEN)
        push.commit = None
        push.clear()
        self._shard.drop(key)

    def _stop(self, stream: WorkerStream, key: PushKey, push: PushRecord) -> None:
        """Mark a push as unwanted, and tell its worker, once on each stream, to send no more of it."""
        stream.arriving.drop_push(key.seq)
        self.mark_unwanted(key, push.assignment)
        if key.seq not in stream.unwanted:
            stream.unwanted = (stream.unwanted & self.open(stream.id).keys()) | {key.seq}
            stream.outbox.send(m.Unwanted(seq=key.seq))

    def mark_unwanted(self, key: PushKey, assignment: int) -> None:
        """Mark an undecided push for an assignment as unwanted: drop its stored parts, and take no others."""
        push = self._opened(key)
        push.assignment = assignment
        if push.life is PushLife.UNWANTED:
            return
        self._recorder.unwanted(key[:2], key.seq, assignment)
        push.become(PushLife.UNWANTED)
        push.clear()
        self._shard.drop(key)

    def _stop_late_pushes(self) -> None:
        """Stop every uncommitted push that control would refuse now."""
        for stream in self._streams.values():
            for seq, push in self._account(stream.id).undecided.items():
                if push.commit is None and self.core.state.unwanted(*stream.id, push.assignment):
                    self._stop(stream, PushKey(*stream.id, seq), push)

    # ---- the course of the job

    def adopt_plan(self) -> None:
        """Drop all stored parts, because there is a new plan, and stop the pushes under the old one. Commits
        stay."""
        self._final.close_round()
        for account in self._accounts.values():
            for push in account.pushes.values():
                push.clear()
        self._stop_late_pushes()

    def forget_gone(self) -> None:
        """Drop the parts of undecided pushes whose members are gone. A member that returns sends them
        again."""
        roster = self.core.state.roster
        for member, account in list(self._accounts.items()):
            if roster.present(member) is not None:
                continue
            for seq in account.undecided:
                self._forget(PushKey(*member, seq))
            if roster.get(member) is None and len(account.undecided) == len(account.pushes):
                del self._accounts[member]

    # ---- reports, checkpoints, recovery

    def open(self, member: Member) -> Mapping[int, PushLife]:
        """Return the state of each undecided push of a member, by seq."""
        return {seq: push.life for seq, push in self._account(member).undecided.items()}

    def stored(self, member: Member) -> tuple[m.Stored, ...]:
        """Return, for each undecided push of a member, the parts that need not be sent again."""
        undecided = self._account(member).undecided
        return tuple(
            m.Stored(seq=seq, parts=tuple(sorted(push.checksums))) for seq, push in undecided.items()
        )

    def image(self) -> dict[str, Any]:
        """Return the complete state without the parts, as plain values that are never written to again;
        `stored_parts` yields the parts."""
        members = {member: account.image() for member, account in self._accounts.items()}
        return {"counted": self._final.image(), "members": members}

    def restore(self, image: Mapping[str, Any]) -> None:
        """Replace the state by one that `image` returned, without parts, which `restore_part` adds."""
        self._final.restore(image["counted"])
        self._accounts = {member: Account.of(each) for member, each in image["members"].items()}

    def stored_parts(self, plan: int) -> Iterator[Stored]:
        """Yield the stored parts of all pushes, as `restore_part` takes them. plan: number of the plan."""
        for member, account in self._accounts.items():
            for seq, push in account.pushes.items():
                for number in push.checksums:
                    part = push.header(seq, number, plan)
                    yield member, part, push.checksums[number], push.payloads[number]

    def restore_part(
        self, member: Member, part: m.PartHeader, checksum: int, payloads: Sequence[Payload]
    ) -> None:
        """Add a part that an earlier server stored: one that the journal has, or that `stored_parts` yielded
        for a push which `restore` has brought."""
        key = PushKey(*member, part.seq)
        push = self._account(member).pushes.get(part.seq) or self._opened(key)
        push.assignment = part.assignment
        if push.rates is None:
            push.rates = part.learning_rates
        self._put(key, push, part, checksum, payloads)

    def _account(self, member: Member) -> Account:
        """Return the pushes of a member, from the roster's last seq on if it has none here."""
        found = self._accounts.get(member)
        if found is None:
            known = self.core.state.roster.get(member)  # which may have left and returned
            found = self._accounts[member] = Account(known.last_seq if known is not None else 0)
        return found

    def _undecided(self, key: PushKey) -> PushRecord | None:
        push = self._account(key[:2]).pushes.get(key.seq)
        return push if push is not None and push.life in UNDECIDED else None

    def _is_closed(self, key: PushKey) -> bool:
        return self._account(key[:2]).is_closed(key.seq)

    def _opened(self, key: PushKey) -> PushRecord:
        """Return an undecided push, and create it if it is new. Raises Refused (SIZE) if the member has too
        many undecided pushes."""
        push = self._undecided(key)
        if push is not None:
            return push
        account = self._account(key[:2])
        if len(account.undecided) >= MAX_OPEN:
            limit, where = f"{MAX_OPEN} undecided pushes", f"push {key.seq}"
            raise refused(Reason.SIZE, worker=key.worker, field=where, limit=limit, value="one more")
        push = account.pushes[key.seq] = PushRecord()
        return push
