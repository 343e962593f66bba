"""The push ledger: what the server knows of each push, from its first part until it is applied.

A push is named by its key (worker, incarnation, seq). `seq` grows and none is used twice, so a copy of a push
is always recognised. Parts that are still arriving belong to a stream and end with it (`arriving`). What is
here belongs to the member, whichever stream it came on: parts that are stored, with their bytes; the commit;
control's decision.

    open        Parts arrive. Each is checked, journaled and then stored; control has not heard of the push.
                If the stream breaks, the next one is told what is stored, and the worker sends only the rest.
                Next: committed, unwanted, abandoned, refused.
    committed   The commit is here. Once all parts that it counts are stored under the digest that it names,
                `Pushed` tells control, which decides once. Parts that were damaged may come after the commit.
                Next: accepted, refused; open again, if what is stored is not what was committed; unwanted,
                abandoned.
    unwanted    Control would refuse the push as it stands. Its parts are dropped; its worker is told
                (`Unwanted`) and sends no more than the commit, which is handed on without parts.
                Next: refused with its commit; open again, if control would accept it after all; abandoned.
    accepted    The outcome names the version that will contain the push; a duplicate gets the same outcome.
                The parts wait here, also if the worker is lost meanwhile. Next: applied.
    applied     An `Apply` has named the key and taken the parts.
    abandoned   The worker found a gradient that is not finite, and keeps its residual as it was before the
                step. Its next push answers the assignment.
    refused     Stale: its round has closed, or there is a new plan; the worker puts the push back, and it
                goes out with the next one. Redundant: others have pushed the same gradient; the worker
                forgets the step. Invalid: the worker ends with the reason. A damaged part refuses nothing: it
                is sent again as the same bytes.

If a member is lost while a push of its is open, or committed with parts missing, the parts are dropped
(`forget_gone`) and the push is open again: the same incarnation may come back and send it whole.

What may not happen: a part reaches the shard, or its worker hears `Stored`, before the journal has the part
(`store`); a push is handed to control before the earlier ones of its member are decided or given up (`next`);
a push changes its state but as `_TRANSITIONS` says.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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

MAX_OPEN = 16  # pushes of a member that have not been decided on
MAX_COUNTED = 1 << 10  # pushes that were not applied as a whole, and of which parts count
STALLED_S = 60.0  # without a chunk; or a lease, if that is longer


class PushLife(Enum):
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
    """One push.

    Attributes:
        assignment: id of the one that it answers; 0 before a part or the commit has said so.
        rates: learning rates that came with its parts; None before a part has come.
        checksums, payloads: of its stored parts, by part. Payloads lie end to end; none where the push
            contributes nothing to a part.
    """

    life: PushLife = PushLife.OPEN
    assignment: int = 0
    rates: tuple[float, ...] | None = None
    commit: m.Commit | None = None
    checksums: dict[int, int] = field(default_factory=dict[int, int])
    payloads: dict[int, Sequence[Payload]] = field(default_factory=dict[int, Sequence[Payload]])

    def become(self, life: PushLife) -> None:
        self.life = move(self.life, life, _TRANSITIONS)

    def clear(self) -> None:
        """Forget the parts that are stored."""
        self.checksums.clear()
        self.payloads.clear()


@dataclass(slots=True)
class _Account:
    """The pushes of one member.

    Attributes:
        through: all pushes up to this seq are over, but for undecided ones: a later push may be abandoned or
            refused while parts of an earlier one are sent again.
        pushes: undecided ones, and accepted ones whose parts wait to be applied, by seq.
        refusals: why the last pushes were refused before control heard of them, by seq.
    """

    through: int
    pushes: dict[int, _Push] = field(default_factory=dict[int, _Push])
    refusals: dict[int, Refusal] = field(default_factory=dict[int, Refusal])

    @property
    def undecided(self) -> dict[int, _Push]:
        """In order of seq."""
        return {seq: push for seq, push in sorted(self.pushes.items()) if push.life in _UNDECIDED}


@dataclass(slots=True)
class _RoundInParts:
    """The open round, if its parts are stepped one by one.

    Attributes:
        final: parts that are stepped, or about to be.
        asked: parts that a substitute for a lost member is to push, by assignment.
    """

    final: set[int] = field(default_factory=set[int])
    asked: dict[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])


class PushLedger:
    """All members' pushes. Belongs to the conductor's event loop."""

    def __init__(
        self, core: Core, shard: Shard, streams: Mapping[str, WorkerStream], recorder: Recorder
    ) -> None:
        """
        Args:
            streams: of the workers that are connected, at any time.
            recorder: writes down each part, and each end that control does not decide.
        """
        self.core, self._shard, self._streams, self._recorder = core, shard, streams, recorder
        self._accounts: dict[Member, _Account] = {}
        self._counted: dict[PushKey, set[int]] = {}
        self._round: _RoundInParts | None = None

    # ---- what is known of a push

    def open(self, member: Member) -> Mapping[int, PushLife]:
        """Return the state of each push of a member that control has not decided on, by seq."""
        return {seq: push.life for seq, push in self._account(member).undecided.items()}

    def stored(self, member: Member) -> tuple[m.Stored, ...]:
        """Return the parts of undecided pushes that need not be sent again."""
        undecided = self._account(member).undecided
        return tuple(
            m.Stored(seq=seq, parts=tuple(sorted(push.checksums))) for seq, push in undecided.items()
        )

    def over(self, key: PushKey) -> bool:
        """Return whether a push has been decided on, abandoned or refused."""
        return key.seq <= self._account(key[:2]).through and self._undecided(key) is None

    def through(self, member: Member) -> int:
        """Return the greatest seq of a member that has been decided on, abandoned or refused."""
        return self._account(member).through

    def refusal(self, key: PushKey) -> Refusal | None:
        """Return why a push was refused before control could decide on it."""
        return self._account(key[:2]).refusals.get(key.seq)

    def unwanted(self, key: PushKey) -> bool:
        push = self._undecided(key)
        return push is not None and push.life is PushLife.UNWANTED

    def rates(self, key: PushKey) -> tuple[float, ...]:
        """Return the learning rates that came with the parts of an undecided push; none for those of the
        job."""
        push = self._undecided(key)
        return () if push is None or push.rates is None else push.rates

    def payloads(self, key: PushKey) -> list[Payload]:
        """Return all payloads that are stored of a push."""
        push = self._account(key[:2]).pushes.get(key.seq)
        return [] if push is None else [each for part in push.payloads.values() for each in part]

    @property
    def held(self) -> list[PushKey]:
        """Pushes of which parts are stored."""
        accounts = self._accounts.items()
        return [
            PushKey(*member, seq)
            for member, each in accounts
            for seq, push in each.pushes.items()
            if push.payloads
        ]

    # ---- what workers send

    def wants(self, key: PushKey, part: int, assignment: int) -> bool:
        """Note that a part begins to arrive, of a push that answers this assignment.

        Returns:
            Whether the part is still needed.

        Raises:
            Refused: SIZE if the member has too many undecided pushes.
        """
        if self.over(key):
            return False
        push = self._opened(key)
        push.assignment = assignment
        return part not in push.checksums and push.life is not PushLife.UNWANTED

    def check_rates(self, member: Member, part: m.PartHeader, groups: int) -> None:
        """Compare the learning rates of a part with those of the push's other parts.

        Args:
            groups: number of parameter groups of the model.

        Raises:
            Refused: GROUP if the rates are invalid, or differ from those of the first part.
        """
        push, rates = self._undecided(PushKey(*member, part.seq)), part.learning_rates
        if push is None or rates == push.rates:
            return
        limit, value = "", str(rates)
        if push.rates is not None:
            limit = f"those of the push's other parts, {push.rates}"
        elif rates and len(rates) != groups:
            limit, value = f"{groups}, one for each parameter group, or none", str(len(rates))
        elif not all(0 <= rate < math.inf for rate in rates):
            limit = "finite numbers of at least 0"
        if limit:
            where = f"push {part.seq}, part {part.part} learning_rates"
            raise refused(Reason.GROUP, worker=member[0], field=where, limit=limit, value=value)
        push.rates = rates

    def store(self, member: Member, part: m.PartHeader, checksum: int, payloads: Sequence[Payload]) -> bool:
        """Store a whole and valid part: first in the journal, then here and in a round that is open.

        A copy of a part that is stored changes nothing.

        Args:
            checksum: crc32c of its bytes.

        Returns:
            False if the part is not needed any more.

        Raises:
            JournalError: the part cannot be written down, and nothing has changed.
        """
        key = PushKey(*member, part.seq)
        push = self._undecided(key)
        if push is None or push.life is PushLife.UNWANTED:
            return False
        if part.part in push.checksums:
            return True
        self._recorder.part(member, part, checksum, payloads)
        if self._round is not None:  # nothing takes back a step
            self._recorder.sync()
        self._put(key, push, part, checksum, payloads)
        return True

    def _put(
        self, key: PushKey, push: _Push, part: m.PartHeader, checksum: int, payloads: Sequence[Payload]
    ) -> None:
        push.checksums[part.part], push.payloads[part.part] = checksum, payloads
        self._shard.put(key, part.part, payloads, part.assignment, part.learning_rates)

    def commit(self, member: Member, commit: m.Commit) -> None:
        """Take the commit of a push that is not over.

        Raises:
            Refused: SIZE if the member has too many undecided pushes.
        """
        push = self._opened(PushKey(*member, commit.seq))
        push.commit, push.assignment = commit, commit.assignment
        if push.life is not PushLife.UNWANTED:
            push.become(PushLife.COMMITTED)

    def next(self, member: Member, plan: int) -> tuple[m.Commit, frozenset[int]] | None:
        """Find the push that control is to decide on next.

        Args:
            plan: number of the plan in force.

        Returns:
            The commit and the parts of the member's first undecided push; None if the commit or parts are
            missing. A push that is unwanted, or of another plan, needs no parts.

        Raises:
            Refused: CHECKSUM if the parts that are stored are not those that were committed.
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
            raise refused(Reason.CHECKSUM, worker=member[0], field=f"push {seq}", limit=limit, value="others")
        return commit, frozenset(push.checksums)

    # ---- ends without control

    def abandon(self, key: PushKey) -> None:
        """Drop a push that its worker gives up."""
        self._end(key, PushLife.ABANDONED)

    def refuse(self, key: PushKey, refusal: Refusal) -> None:
        """Drop an invalid push, and remember why."""
        self._end(key, PushLife.REFUSED, refusal)
        refusals_ = self._account(key[:2]).refusals
        refusals_[key.seq] = refusal
        while len(refusals_) > MAX_OPEN:
            del refusals_[next(iter(refusals_))]

    def _end(self, key: PushKey, life: PushLife, refusal: Refusal | None = None) -> None:
        self._recorder.closed(key[:2], key.seq, refusal, again=False)
        account, push = self._account(key[:2]), self._undecided(key)
        if push is not None:
            push.become(life)
            del account.pushes[key.seq]
        account.through = max(account.through, key.seq)
        self._shard.drop(key)

    def start_over(self, key: PushKey) -> None:
        """Have all parts of an undecided push, and its commit, sent again."""
        self._recorder.closed(key[:2], key.seq, None, again=True)
        self._forget(key)

    def _forget(self, key: PushKey) -> None:
        push = self._opened(key)
        push.become(PushLife.OPEN)
        push.commit, push.rates = None, None
        push.clear()
        self._shard.drop(key)

    def give_up(self, stream: WorkerStream, seq: int) -> None:
        """Keep nothing of a push that would be refused, and tell its worker to send no more of it."""
        stream.arriving.drop_push(seq)
        self.do_without(PushKey(*stream.id, seq))
        if seq not in stream.unwanted:
            stream.unwanted = (stream.unwanted & self.open(stream.id).keys()) | {seq}
            stream.outbox.send(m.Unwanted(seq=seq))

    def do_without(self, key: PushKey) -> None:
        """Drop the parts of an undecided push, those that are still to come as well."""
        push = self._opened(key)
        if push.life is PushLife.UNWANTED:
            return
        self._recorder.unwanted(key[:2], key.seq, push.assignment)
        push.become(PushLife.UNWANTED)
        push.clear()
        self._shard.drop(key)

    def give_up_late(self) -> None:
        """A round has closed, or there is a new plan: give up the pushes that are too late now."""
        for stream in self._streams.values():
            for seq, push in self._account(stream.id).undecided.items():
                if push.commit is None and self.core.unwanted(*stream.id, push.assignment):
                    self.give_up(stream, seq)

    # ---- what control decides

    def decided(self, key: PushKey, *, accepted: bool) -> None:
        """Take control's decision: parts of an accepted push wait for its `Apply`, others are forgotten."""
        account, push = self._account(key[:2]), self._undecided(key)
        account.through = max(account.through, key.seq)
        if push is None:
            return
        if push.life is PushLife.OPEN:  # during a recovery: the commit is in the record of the decision
            push.become(PushLife.COMMITTED)
        push.become(PushLife.ACCEPTED if accepted else PushLife.REFUSED)
        if not (accepted and push.payloads):
            del account.pushes[key.seq]

    def take(self, order: e.Apply) -> tuple[list[Push], Sequence[float]]:
        """Return the parts of the pushes that an order names, and their learning rates; forget them here."""
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
        """From now on parts may be stepped before their pushes are decided on; `take` closes the round."""
        self._round = _RoundInParts()

    def final(self, report: Final) -> None:
        """Note a part that is about to be stepped, and the pushes that count in it."""
        assert self._round is not None, "no round is open"
        self._round.final.add(report.part)
        for key in report.keys:
            self._counted.setdefault(key, set()).add(report.part)

    def ask(self, assignment: int, parts: int) -> tuple[int, ...]:
        """Have a substitute push the parts that are not final. parts: number of all."""
        if self._round is None:
            return ()
        missing = tuple(part for part in range(parts) if part not in self._round.final)
        self._round.asked[assignment] = missing
        return missing

    def asked(self, assignment: int) -> tuple[int, ...]:
        """Return the parts that a substitute is to push, ascending; none for other assignments."""
        return () if self._round is None else self._round.asked.get(assignment, ())

    def counted(self, key: PushKey) -> frozenset[int]:
        """Return the parts of a push that are in a version although the push was never applied as a whole."""
        return frozenset(self._counted.get(key, ()))

    # ---- the course of the job

    def forget_parts(self) -> None:
        """There is a new plan: drop all parts that are stored. Commits stay."""
        self._round = None
        for account in self._accounts.values():
            for push in account.pushes.values():
                push.clear()

    def forget_gone(self) -> None:
        """Drop the parts of undecided pushes of members who are gone; they may come back and send them."""
        roster = self.core.roster
        for member, account in list(self._accounts.items()):
            if roster.present(member) is not None:
                continue
            for seq in account.undecided:
                self._forget(PushKey(*member, seq))
            if roster.get(member) is None and len(account.undecided) == len(account.pushes):
                del self._accounts[member]

    def end_stalled(self, now: float) -> None:
        """End streams on which a part has begun and nothing follows: on a new one it may come whole.

        Args:
            now: seconds of the monotonic clock.
        """
        limit_s = max(STALLED_S, self.core.rules.lease_seconds)
        for stream in self._streams.values():
            part, silent_s = stream.arriving.unfinished, now - stream.chunk_at
            if part is not None and silent_s > limit_s:
                why = refusals.stalled(stream.worker, part.seq, part.part, limit_s)
                stream.outbox.end(why, final=False)

    # ---- checkpoints

    def image(self) -> dict[str, Any]:
        """Return all but the parts as values that nobody changes; `stored_parts` has those."""
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
        """Go on from an `image`; `carry` brings the parts."""
        self._counted = {key: set(parts) for key, parts in image["counted"].items()}
        for member, plain in image["members"].items():
            pushes = {
                seq: _Push(PushLife(life), assignment, rates, commit)
                for seq, (life, assignment, rates, commit) in plain["pushes"].items()
            }
            self._accounts[member] = _Account(plain["through"], pushes, dict(plain["refusals"]))

    def stored_parts(self, plan: int) -> Iterator[Stored]:
        """Return the parts of all pushes here, as `carry` takes them. plan: its number."""
        for member, account in self._accounts.items():
            for seq, push in account.pushes.items():
                for number, payloads in push.payloads.items():
                    part = m.PartHeader(
                        seq=seq,
                        assignment=push.assignment,
                        part=number,
                        plan=plan,
                        payloads=tuple(map(payload_header, payloads)),
                        learning_rates=push.rates or (),
                    )
                    yield member, part, push.checksums[number], payloads

    def carry(self, member: Member, part: m.PartHeader, checksum: int, payloads: Sequence[Payload]) -> None:
        """Take a part that was stored when the image was taken."""
        key = PushKey(*member, part.seq)
        self._put(key, self._account(member).pushes[part.seq], part, checksum, payloads)

    # ---- entries

    def _account(self, member: Member) -> _Account:
        found = self._accounts.get(member)
        if found is None:
            known = self.core.roster.get(member)  # which may have left, and come back
            found = self._accounts[member] = _Account(known.last_seq if known is not None else 0)
        return found

    def _undecided(self, key: PushKey) -> _Push | None:
        push = self._account(key[:2]).pushes.get(key.seq)
        return push if push is not None and push.life in _UNDECIDED else None

    def _opened(self, key: PushKey) -> _Push:
        """Return an undecided push, which may be a new one. Raises Refused: SIZE for one too many."""
        push = self._undecided(key)
        if push is not None:
            return push
        account = self._account(key[:2])
        if len(account.undecided) >= MAX_OPEN:
            limit = f"{MAX_OPEN} open pushes"
            where = f"push {key.seq}"
            raise refused(Reason.SIZE, worker=key.worker, field=where, limit=limit, value="one more")
        push = account.pushes[key.seq] = _Push()
        return push
