"""The push ledger: the server's record of each push, from its first part until it is applied.

A push is identified by its key (worker, incarnation, seq). `seq` grows and no value is used twice, so a copy
of a push is always recognised. Parts that are still arriving belong to a stream and end with it (`arriving`).
The ledger's records belong to the member, on any stream: stored parts with their bytes, the commit, and
control's decision.

    | state     | meaning                                                        | next                  |
    |-----------|----------------------------------------------------------------|-----------------------|
    | open      | Parts arrive. Control does not know of the push yet.           | committed, unwanted,  |
    |           |                                                                | abandoned, refused    |
    | committed | The commit has arrived. Parts may still be missing.            | accepted, refused,    |
    |           |                                                                | open, unwanted,       |
    |           |                                                                | abandoned             |
    | unwanted  | Control would refuse the push now, so its parts are dropped.   | refused, open,        |
    |           |                                                                | abandoned             |
    | accepted  | Control has accepted it. Its parts wait to be applied.         | applied               |
    | applied   | An `Apply` order has named the key and taken the parts.        |                       |
    | abandoned | The worker has given the push up.                              |                       |
    | refused   | The push is stale, redundant or invalid.                       |                       |

Open: each part is checked, journaled and then stored. If the stream breaks, the worker's next stream reports
the stored parts, and the worker sends only the missing ones.

Committed: once all parts that the commit counts are stored under the digest that it names, `Pushed` tells
control, which decides once. A part that was damaged may arrive after the commit. If the stored parts differ
from the committed ones, the push is open again.

Unwanted: the server tells the worker (`Unwanted`), which sends no more than the commit. Control gets the
commit without parts and refuses the push. If control would now accept it, the push is open again.

Accepted: the outcome names the version that will contain the push; a duplicate gets the same outcome. The
parts stay stored even if the worker is lost.

Abandoned: the worker found a gradient that is not finite, and keeps its residual from before the step. Its
next push answers the same assignment.

Refused as stale: the round of the push has closed, or there is a new plan. The worker adds the push to its
residual, and sends it with the next one. Refused as redundant: other workers have pushed the same gradient,
and the worker forgets the step. Refused as invalid: the worker ends with the reason. A damaged part refuses
no push: the worker sends the same bytes again.

If a member is lost while a push of its is open, or committed with parts missing, the parts are dropped
(`forget_gone`). The push is then open: the same incarnation may return and send it whole.

Must not happen:

- A part reaches the shard, or its worker receives `Stored`, before the journal has the part (`store`).
- Control gets a push before the earlier pushes of the same member are decided, abandoned or refused (`next`).
- A push changes its state in a way that `_TRANSITIONS` does not list.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from ...compressors import Payload
from ...proto import messages as m
from ...proto.refusal import Reason, Refusal, refused
from ...proto.transfer import digest, payload_header
from ..durable.recorder import Member, Recorder, Stored
from ..job import events as e
from ..job import refusals
from ..job.core import Core
from ..job.events import PushKey
from ..job.transitions import move
from ..shard.mean import Push
from ..shard.reports import Final
from ..shard.shard import Shard
from .outbox import WorkerStream

MAX_OPEN = 16  # most undecided pushes of a member
MAX_COUNTED = 1 << 10  # most pushes whose parts count although they were not applied as a whole
STALLED_S = 60.0  # time without a chunk after which a stream ends; or the lease, if that is longer


class PushLife(Enum):
    """State of a push. The table at the head of this file explains the states."""

    OPEN = "open"
    COMMITTED = "committed"
    UNWANTED = "unwanted"
    ACCEPTED = "accepted"
    APPLIED = "applied"
    ABANDONED = "abandoned"
    REFUSED = "refused"


_OVER = frozenset({PushLife.ABANDONED, PushLife.REFUSED})
_TRANSITIONS = {
    PushLife.OPEN: frozenset({PushLife.OPEN, PushLife.COMMITTED, PushLife.UNWANTED}) | _OVER,
    PushLife.COMMITTED: (
        frozenset({PushLife.COMMITTED, PushLife.OPEN, PushLife.UNWANTED, PushLife.ACCEPTED}) | _OVER
    ),
    PushLife.UNWANTED: frozenset({PushLife.UNWANTED, PushLife.OPEN}) | _OVER,
    PushLife.ACCEPTED: frozenset({PushLife.APPLIED}),
    PushLife.APPLIED: frozenset[PushLife](),
    PushLife.ABANDONED: frozenset[PushLife](),
    PushLife.REFUSED: frozenset[PushLife](),
}
_UNDECIDED = frozenset({PushLife.OPEN, PushLife.COMMITTED, PushLife.UNWANTED})


@dataclass(slots=True)
class _Push:
    """The record of one push.

    Attributes:
        life: state of the push.
        assignment: id of the assignment that it answers; 0 before a part or the commit has named it.
        rates: its learning rates, which its first header brought; None before.
        commit: the commit; None before it arrives.
        checksums: crc32c of each stored part, by number.
        payloads: payloads of each stored part, by number, end to end; empty where the push contributes
            nothing to the part.
    """

    life: PushLife = PushLife.OPEN
    assignment: int = 0
    rates: tuple[float, ...] | None = None
    commit: m.Commit | None = None
    checksums: dict[int, int] = field(default_factory=dict[int, int])
    payloads: dict[int, Sequence[Payload]] = field(default_factory=dict[int, Sequence[Payload]])

    def become(self, life: PushLife) -> None:
        """Change the state. Only a transition that `_TRANSITIONS` lists is allowed."""
        self.life = move(self.life, life, _TRANSITIONS)

    def clear(self) -> None:
        """Drop the stored parts."""
        self.checksums.clear()
        self.payloads.clear()


@dataclass(slots=True)
class _Account:
    """The pushes of one member.

    Attributes:
        through: every push up to this seq is closed, unless it is undecided: a later push may be abandoned or
            refused while parts of an earlier one are sent again.
        pushes: undecided pushes, and accepted ones whose parts wait to be applied, by seq.
        refusals: reasons of the last pushes that were refused without control, by seq.
    """

    through: int
    pushes: dict[int, _Push] = field(default_factory=dict[int, _Push])
    refusals: dict[int, Refusal] = field(default_factory=dict[int, Refusal])

    @property
    def undecided(self) -> dict[int, _Push]:
        """Pushes that control has not decided on, by seq, ascending."""
        return {seq: push for seq, push in sorted(self.pushes.items()) if push.life in _UNDECIDED}


@dataclass(slots=True)
class _RoundInParts:
    """The open round, if its parts are stepped one by one.

    Attributes:
        final: numbers of the parts that are stepped or about to be.
        asked: numbers of the parts that a substitute for a lost member has to push, by its assignment.
    """

    final: set[int] = field(default_factory=set[int])
    asked: dict[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])


class PushLedger:
    """The pushes of all members. The conductor owns it, on its event loop; streams and recovery fill it."""

    def __init__(
        self, core: Core, shard: Shard, streams: Mapping[str, WorkerStream], recorder: Recorder
    ) -> None:
        """
        Args:
            core: control, whose roster and rules the ledger reads.
            shard: gets each stored part, and drops those of pushes that end.
            streams: streams of the connected workers, by worker; it changes as they connect.
            recorder: journals each part, and each end of a push that control does not decide."""
        self.core, self._shard, self._streams, self._recorder = core, shard, streams, recorder
        self._accounts: dict[Member, _Account] = {}
        self._counted: dict[PushKey, set[int]] = {}
        self._round: _RoundInParts | None = None

    # ---- queries

    def open(self, member: Member) -> Mapping[int, PushLife]:
        """Return the state of each undecided push of a member, by seq."""
        return {seq: push.life for seq, push in self._account(member).undecided.items()}

    def stored(self, member: Member) -> tuple[m.Stored, ...]:
        """Return, for each undecided push of a member, the parts that are stored and need not be sent
        again."""
        undecided = self._account(member).undecided
        return tuple(
            m.Stored(seq=seq, parts=tuple(sorted(push.checksums))) for seq, push in undecided.items()
        )

    def is_closed(self, key: PushKey) -> bool:
        """Return True when a push is closed: decided, abandoned or refused."""
        return key.seq <= self._account(key[:2]).through and self._undecided(key) is None

    def through(self, member: Member) -> int:
        """Return the greatest seq of a member's closed pushes, which are decided, abandoned or refused."""
        return self._account(member).through

    def refusal(self, key: PushKey) -> Refusal | None:
        """Return the reason why a push was refused without control; None if it was not, or long ago."""
        return self._account(key[:2]).refusals.get(key.seq)

    def unwanted(self, key: PushKey) -> bool:
        """Return True when a push is unwanted: control would refuse it, so the ledger takes none of its
        parts."""
        push = self._undecided(key)
        return push is not None and push.life is PushLife.UNWANTED

    def rates(self, key: PushKey) -> tuple[float, ...]:
        """Return the learning rates of an undecided push, by parameter group; empty for those of the job."""
        push = self._undecided(key)
        return () if push is None or push.rates is None else push.rates

    def payloads(self, key: PushKey) -> list[Payload]:
        """Return all stored payloads of a push."""
        push = self._account(key[:2]).pushes.get(key.seq)
        return [] if push is None else [each for part in push.payloads.values() for each in part]

    @property
    def held(self) -> list[PushKey]:
        """Keys of the pushes that have stored parts."""
        accounts = self._accounts.items()
        return [
            PushKey(*member, seq)
            for member, each in accounts
            for seq, push in each.pushes.items()
            if push.payloads
        ]

    # ---- messages of workers

    def needs_part(self, key: PushKey, part: int, assignment: int) -> bool:
        """Record that a part of a push begins to arrive. Return True when the part is still needed.

        Args:
            key: identity of the push.
            part: number of the part in the plan.
            assignment: id of the assignment that the push answers.

        Raises:
            Refused: SIZE, the member has too many undecided pushes.
        """
        if self.is_closed(key):
            return False
        push = self._opened(key)
        push.assignment = assignment
        return part not in push.checksums and push.life is not PushLife.UNWANTED

    def rate(self, member: Member, part: m.PartHeader, groups: int) -> None:
        """Record the learning rates of a push. Its first header has them, and others may repeat them.

        Args:
            member: worker and incarnation that pushes.
            part: header of the part.
            groups: number of parameter groups of the model.

        Raises:
            Refused: GROUP, the rates are invalid or differ from those that the push has.
        """
        push, rates = self._undecided(PushKey(*member, part.seq)), part.learning_rates
        if push is None or (not rates and push.rates is not None):
            return
        limit, value = "", str(len(rates))
        if len(rates) not in (0, 1, groups):
            limit = f"{groups}, one for each parameter group, or 1 for all groups, or none"
        rates = rates * groups if len(rates) == 1 else rates
        wrong = [group for group, rate in enumerate(rates) if not 0 <= rate < math.inf]
        if not limit and wrong:
            limit, value = "finite numbers of at least 0", f"{rates[wrong[0]]} for group {wrong[0]}"
        if not limit and push.rates not in (None, rates):
            limit, value = "those of the push's first part", "others"
        if limit:
            where = f"push {part.seq}, part {part.part} learning_rates"
            raise refused(Reason.GROUP, worker=member[0], field=where, limit=limit, value=value)
        push.rates = rates

    def begun(self, key: PushKey) -> bool:
        """Return True if a part of an undecided push is stored."""
        push = self._undecided(key)
        return push is not None and bool(push.checksums)

    def store(self, member: Member, part: m.PartHeader, checksum: int, payloads: Sequence[Payload]) -> bool:
        """Store a complete and valid part: first in the journal, then here and in an open round. A copy of a
        stored part changes nothing.

        Args:
            member: worker and incarnation that pushes.
            part: header of the part.
            checksum: crc32c of the part's bytes.
            payloads: decoded payloads of the part, end to end.

        Returns:
            True when the part is stored now, also by an earlier copy; False if it is no longer needed.

        Raises:
            JournalError: the part cannot be journaled; nothing has changed.
        """
        key = PushKey(*member, part.seq)
        push = self._undecided(key)
        if push is None or push.life is PushLife.UNWANTED:
            return False
        if part.part in push.checksums:
            return True
        # The first record of a push has its rates, for its first header may have come with a later part.
        part = replace(part, learning_rates=() if push.checksums else push.rates or ())
        self._recorder.part(member, part, checksum, payloads)
        if self._round is not None:  # a step cannot be undone, so the record has to be on the disk first
            self._recorder.sync()
        self._put(key, push, part, checksum, payloads)
        return True

    def _put(
        self, key: PushKey, push: _Push, part: m.PartHeader, checksum: int, payloads: Sequence[Payload]
    ) -> None:
        """Add a part to its push, and hand it to the shard."""
        push.checksums[part.part], push.payloads[part.part] = checksum, payloads
        self._shard.put(key, part.part, payloads, part.assignment, push.rates or ())

    def commit(self, member: Member, commit: m.Commit) -> None:
        """Store the commit of a push that is not closed.

        Raises:
            Refused: SIZE, the member has too many undecided pushes.
        """
        push = self._opened(PushKey(*member, commit.seq))
        push.commit, push.assignment = commit, commit.assignment
        if push.life is not PushLife.UNWANTED:
            push.become(PushLife.COMMITTED)

    def next(self, member: Member, plan: int) -> tuple[m.Commit, frozenset[int]] | None:
        """Return the commit and the parts of the member's first undecided push, if control can decide on it;
        otherwise None.

        A push needs its commit and all parts that the commit counts. A push that is unwanted, or of another
        plan, needs no parts.

        Args:
            member: worker and incarnation that pushes.
            plan: number of the plan in force.

        Raises:
            Refused: CHECKSUM, the stored parts differ from the committed ones.
        """
        undecided = self._account(member).undecided
        if not undecided:
            return None
        seq, push = next(iter(undecided.items()))
        commit = push.commit
        if commit is None:
            return None
        if push.life is PushLife.UNWANTED or (commit.parts and commit.plan != plan):
            return commit, frozenset()
        if len(push.checksums) < commit.parts:
            return None
        if digest(push.checksums) != commit.digest or len(push.checksums) != commit.parts:
            limit = f"{commit.parts} parts with digest {commit.digest:08x}"
            raise refused(
                Reason.CHECKSUM, worker=member[0], field=f"push {seq}", limit=limit, value="other parts"
            )
        return commit, frozenset(push.checksums)

    # ---- ends without control

    def abandon(self, key: PushKey) -> None:
        """Drop a push that its worker gives up."""
        self._end(key, PushLife.ABANDONED)

    def refuse(self, key: PushKey, refusal: Refusal) -> None:
        """Drop an invalid push, and keep the reason for copies of its commit."""
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

    def stop_push(self, stream: WorkerStream, seq: int) -> None:
        """Drop the parts of a push that control would refuse, and tell its worker to send no more of it."""
        stream.arriving.drop_push(seq)
        self.mark_unwanted(PushKey(*stream.id, seq))
        if seq not in stream.unwanted:
            stream.unwanted = (stream.unwanted & self.open(stream.id).keys()) | {seq}
            stream.outbox.send(m.Unwanted(seq=seq))

    def mark_unwanted(self, key: PushKey) -> None:
        """Mark an undecided push as unwanted: drop its stored parts, and take no others."""
        push = self._opened(key)
        if push.life is PushLife.UNWANTED:
            return
        self._recorder.unwanted(key[:2], key.seq, push.assignment)
        push.become(PushLife.UNWANTED)
        push.clear()
        self._shard.drop(key)

    def stop_late_pushes(self) -> None:
        """Stop every uncommitted push that control would refuse now. Called after a round has closed or a
        plan was adopted."""
        for stream in self._streams.values():
            for seq, push in self._account(stream.id).undecided.items():
                if push.commit is None and self.core.state.unwanted(*stream.id, push.assignment):
                    self.stop_push(stream, seq)

    # ---- decisions of control

    def decided(self, key: PushKey, *, accepted: bool) -> None:
        """Record control's decision. The parts of an accepted push wait for its `Apply`; those of a refused
        push are dropped."""
        account, push = self._account(key[:2]), self._undecided(key)
        account.through = max(account.through, key.seq)
        if push is None:
            return
        if push.life is PushLife.OPEN:  # during recovery, where the decision's record holds the commit
            push.become(PushLife.COMMITTED)
        push.become(PushLife.ACCEPTED if accepted else PushLife.REFUSED)
        if not (accepted and push.payloads):
            del account.pushes[key.seq]

    def take(self, order: e.Apply) -> tuple[list[Push], Sequence[float]]:
        """Return the parts of the pushes that an order names, in its order, and their learning rates; remove
        the pushes from the ledger."""
        found: list[Push] = []
        rates: Sequence[float] = ()
        self._round = None
        for each in order.contributions:
            self._counted.pop(each.key, None)
            if not each.samples:
                found.append({})
                continue
            push = self._account(each.key[:2]).pushes.pop(each.key.seq)
            push.become(PushLife.APPLIED)
            rates = rates or push.rates or ()
            found.append(push.payloads)
        while len(self._counted) > MAX_COUNTED:
            del self._counted[next(iter(self._counted))]
        return found, rates

    # ---- rounds whose parts are stepped one by one

    def open_round(self) -> None:
        """Begin a round whose parts may be stepped before their pushes are decided. `take` ends it."""
        self._round = _RoundInParts()

    def final(self, report: Final) -> None:
        """Record a part that is about to be stepped, and the pushes that count in it."""
        assert self._round is not None, "no round is open"
        self._round.final.add(report.part)
        for key in report.keys:
            self._counted.setdefault(key, set()).add(report.part)

    def ask_substitute(self, assignment: int, parts: int) -> tuple[int, ...]:
        """Assign all parts that are not final to a substitute, and return their numbers; empty if no round is
        open.

        Args:
            assignment: id of the substitute's assignment.
            parts: number of parts in the plan.
        """
        if self._round is None:
            return ()
        missing = tuple(part for part in range(parts) if part not in self._round.final)
        self._round.asked[assignment] = missing
        return missing

    def asked_parts(self, assignment: int) -> tuple[int, ...]:
        """Return the numbers of the parts that a substitute has to push for its assignment, ascending; empty
        for other assignments."""
        return () if self._round is None else self._round.asked.get(assignment, ())

    def counted_parts(self, key: PushKey) -> frozenset[int]:
        """Return the parts of a push that a version contains although the push was never applied as a
        whole."""
        return frozenset(self._counted.get(key, ()))

    # ---- the course of the job

    def forget_parts(self) -> None:
        """Drop all stored parts, because there is a new plan. Commits stay."""
        self._round = None
        for account in self._accounts.values():
            for push in account.pushes.values():
                push.clear()

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

    def end_stalled(self, now: float) -> None:
        """End each stream on which a part has begun and no chunk has arrived for too long. The worker may
        send the part again on a new stream.

        Args:
            now: seconds of the monotonic clock.
        """
        limit_s = max(STALLED_S, self.core.state.rules.lease_seconds)
        for stream in self._streams.values():
            part, silent_s = stream.arriving.unfinished, now - stream.chunk_at
            if part is not None and silent_s > limit_s:
                why = refusals.stalled(stream.worker, part.seq, part.part, limit_s)
                stream.outbox.end(why, final=False)

    # ---- checkpoints

    def image(self) -> dict[str, Any]:
        """Return the complete state without the parts, as plain values that are never written to again;
        `stored_parts` yields the parts."""
        counted = {key: sorted(parts) for key, parts in self._counted.items()}
        members = {
            member: {
                "through": account.through,
                "refusals": dict(account.refusals),
                "pushes": {
                    seq: (push.life.value, push.assignment, push.rates, push.commit)
                    for seq, push in account.pushes.items()
                },
            }
            for member, account in self._accounts.items()
        }
        return {"counted": counted, "members": members}

    def restore(self, image: Mapping[str, Any]) -> None:
        """Replace the state by one that `image` returned, without parts, which `restore_part` adds."""
        self._counted = {key: set(parts) for key, parts in image["counted"].items()}
        for member, plain in image["members"].items():
            pushes = {
                seq: _Push(PushLife(life), assignment, rates, commit)
                for seq, (life, assignment, rates, commit) in plain["pushes"].items()
            }
            self._accounts[member] = _Account(plain["through"], pushes, dict(plain["refusals"]))

    def stored_parts(self, plan: int) -> Iterator[Stored]:
        """Yield the stored parts of all pushes, in the form that `restore_part` takes. plan: number of the
        plan."""
        for member, account in self._accounts.items():
            for seq, push in account.pushes.items():
                for number, payloads in push.payloads.items():
                    part = m.PartHeader(
                        seq=seq,
                        assignment=push.assignment,
                        part=number,
                        plan=plan,
                        payloads=tuple(map(payload_header, payloads)),
                    )
                    yield member, part, push.checksums[number], payloads

    def restore_part(
        self, member: Member, part: m.PartHeader, checksum: int, payloads: Sequence[Payload]
    ) -> None:
        """Add a part from `stored_parts` to the push that `restore` has brought."""
        key = PushKey(*member, part.seq)
        self._put(key, self._account(member).pushes[part.seq], part, checksum, payloads)

    # ---- entries

    def _account(self, member: Member) -> _Account:
        """Return the pushes of a member, from the roster's last seq on if it has none here."""
        found = self._accounts.get(member)
        if found is None:
            known = self.core.state.roster.get(member)  # which may have left and returned
            found = self._accounts[member] = _Account(known.last_seq if known is not None else 0)
        return found

    def _undecided(self, key: PushKey) -> _Push | None:
        """Return a push that control has not decided on, or None."""
        push = self._account(key[:2]).pushes.get(key.seq)
        return push if push is not None and push.life in _UNDECIDED else None

    def _opened(self, key: PushKey) -> _Push:
        """Return an undecided push, and create it if it is new.

        Raises:
            Refused: SIZE, the member has too many undecided pushes.
        """
        push = self._undecided(key)
        if push is not None:
            return push
        account = self._account(key[:2])
        if len(account.undecided) >= MAX_OPEN:
            limit = f"{MAX_OPEN} undecided pushes"
            where = f"push {key.seq}"
            raise refused(Reason.SIZE, worker=key.worker, field=where, limit=limit, value="one more")
        push = account.pushes[key.seq] = _Push()
        return push
