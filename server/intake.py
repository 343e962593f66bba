"""What has come of all members' pushes that are not decided on: parts that the shard has stored, and pushes
that are of no use any more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..compressors import Payload
from ..proto import messages as m
from ..proto.refusal import Refusal
from .durable.recorder import Member, Recorder
from .job import events as e
from .job import refusals
from .job.core import Core
from .shard.inbox import Arrivals
from .shard.shard import Shard
from .streams import WorkerStream

STALLED_S = 60.0  # without a chunk; or a lease, if that is longer


class Intake:
    """Belongs to the conductor's event loop."""

    def __init__(
        self, core: Core, shard: Shard, streams: Mapping[str, WorkerStream], recorder: Recorder
    ) -> None:
        self.core, self._shard, self._streams, self._recorder = core, shard, streams, recorder
        self._arrivals: dict[Member, Arrivals] = {}

    @property
    def all(self) -> Mapping[Member, Arrivals]:
        """By worker and incarnation."""
        return self._arrivals

    def of(self, worker: str, incarnation: int) -> Arrivals:
        """What has come of a member's pushes."""
        found = self._arrivals.get((worker, incarnation))
        if found is None:
            member = self.core.roster.get((worker, incarnation))  # which may be set aside, and come back
            found = Arrivals(worker, member.last_seq if member is not None else 0)
            self._arrivals[worker, incarnation] = found
        return found

    def store(self, member: Member, part: m.Part, checksum: int, payloads: Sequence[Payload]) -> bool:
        """A part is here whole and valid. Returns False if it is not needed any more. Raises Refused."""
        if not self.of(*member).store(part.seq, part.part, checksum):
            return False
        self._recorder.part(member, part, checksum, payloads)
        if self._shard.steps_parts:
            self._recorder.sync()
        key = e.PushKey(*member, part.seq)
        self._shard.put(key, part.part, payloads, part.assignment, part.learning_rates)
        return True

    def close(self, member: Member, seq: int, refusal: Refusal | None = None, *, again: bool = False) -> None:
        """A push is abandoned or refused. again: only what is stored of it, and all of it may come again."""
        self._recorder.closed(member, seq, refusal, again=again)
        arrivals = self.of(*member)
        if again:
            arrivals.forget(seq)
        else:
            arrivals.close(seq, refusal)
        self._shard.drop(e.PushKey(*member, seq))

    def do_without(self, member: Member, seq: int) -> None:
        """The parts of a push are of no use."""
        arrivals = self.of(*member)
        self._recorder.unwanted(member, seq, arrivals.assignment(seq))
        arrivals.give_up(seq)
        self._shard.drop(e.PushKey(*member, seq))

    def give_up(self, stream: WorkerStream, seq: int) -> None:
        """Keep nothing of a push that would be refused, and tell its worker to send no more of it."""
        stream.inbox.drop_push(seq)
        self.do_without(stream.id, seq)
        if seq not in stream.unwanted:
            stream.unwanted = (stream.unwanted & {*self.of(*stream.id).open}) | {seq}
            stream.outbox.send(m.Unwanted(seq=seq))

    def give_up_late(self) -> None:
        """A round has closed, or there is a new plan: what still comes for it is too late."""
        for stream in self._streams.values():
            for seq, assignment in self.of(*stream.id).coming.items():
                if self.core.unwanted(*stream.id, assignment):
                    self.give_up(stream, seq)

    def end_stalled(self, now: float) -> None:
        """End streams on which a part has begun to come and nothing follows: on a new one it may come whole.
        now: seconds of the monotonic clock."""
        limit_s = max(STALLED_S, self.core.rules.lease_seconds)
        for stream in self._streams.values():
            part, silent_s = stream.inbox.unfinished, now - stream.chunk_at
            if part is not None and silent_s > limit_s:
                why = refusals.stalled(stream.worker, part.seq, part.part, limit_s)
                stream.outbox.end(why, final=False)

    def forget_parts(self) -> None:
        """There is a new plan: parts under the old one are of no use."""
        for arrivals in self._arrivals.values():
            arrivals.forget_parts()

    def forget_gone(self) -> None:
        """Drop parts of open pushes of members who are gone; who is set aside may send them again."""
        roster = self.core.roster
        for name, arrivals in list(self._arrivals.items()):
            member = roster.members.get(name[0])
            if member is not None and member.incarnation == name[1]:
                continue
            for seq in arrivals.open:
                self._shard.drop(e.PushKey(*name, seq))
                arrivals.forget(seq)
            if roster.get(name) is None:
                del self._arrivals[name]
