"""Recovery: a new server takes over the newest checkpoint of an earlier one, and replays the journal since
then, in the same order and at the same times.

The outcome is the same because the journal has all inputs of control and shard. The replay drives the
conductor through the methods that live traffic calls. So each record has the same consequences as before:
rounds in parts are stepped, updates are encoded for workers that will return, files are written. Only one
input comes from another thread, so its place in the order must be restored: a version is published where the
journal has the event, and the replay waits there for the shard.

No messages are sent meanwhile, because no worker is connected. Workers that return find their membership, the
stored parts of their pushes, and the outcomes of decided ones. After the replay (`Restarted`) all leases
begin anew. No round opens before all members are back or lost, so that a restart does not affect the bits.
Assignment ids skip ahead, because a machine that lost power may have sent some that no record has. If
versions were lost (`Welcome.newest`), workers that have later ones drop their replicas and get snapshots.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any

from ...common import failpoints
from ...proto import messages as m
from ...proto.plans import plan_of
from ...proto.refusal import Refused
from ...proto.transfer import received_payloads
from ...proto.wire import decode_envelope
from ...storage.checkpoint import FormatError
from ...storage.values import DamagedError
from ..conductor import Conductor
from ..durable import recorder as r
from ..durable.folder import StateError, StateFolder
from ..durable.journal import JournalError, Record
from ..history import History
from ..job import events as e
from ..shard.model_state import Deposit
from .image import restore

log = logging.getLogger("gradwire.server")


# Exceptions that a folder can cause which no server of this release has written.
_UNUSABLE = (
    *(Refused, JournalError, DamagedError, FormatError, OSError),
    *(AssertionError, AttributeError, IndexError, KeyError, TypeError, ValueError),
)


async def recover(conductor: Conductor, folder: StateFolder) -> bool:
    """Restore the job in the folder into a new conductor: its newest checkpoint, and the journal since then.

    Args:
        conductor: conductor that has just been created.
        folder: folder of --state, which this process holds.

    Returns:
        True if the job was restored; False if the folder has no checkpoint.

    Raises:
        StateError: checkpoint or journal cannot be used. The message has the remedy.
    """
    began, found = time.monotonic(), await asyncio.to_thread(folder.newest)
    if found is None:
        return False
    pushes, where = 0, f"its checkpoint of version {found.version}"
    try:
        replay = _Replay(conductor, found.tree["now"])
        await restore(conductor, found.tree)
        if not found.tree["announced"]:
            replay.applied.append(conductor.shard.reported.version)
        conductor.recorder.bytes = found.bytes
        for placed in folder.records(found.version):
            where = placed.where
            if not (placed.record.fields.get("carried") and not placed.own):
                pushes += await replay.record(placed.record)
            failpoints.reached("journal.read")
        await replay.end()
    except _UNUSABLE as error:
        raise StateError(
            f"--state {folder.name}: cannot continue from version {found.version}, at {where}: {error!r}. "
            "Nothing was cut off; start the release of gradwire that wrote it, and report this"
        ) from error
    log.info(
        "read the checkpoint of version %d and %d pushes of the journal in %.1f s; resuming at version %d",
        *(found.version, pushes, time.monotonic() - began, conductor.core.state.version),
    )
    if conductor.core.state.done:
        text = (
            "the job in --state %s is finished. To train again, use another folder (Kubernetes: nameSuffix)"
        )
        log.warning(text, folder.name)
    return True


class _Replay:
    """Drives a conductor with the records of a journal, at the times of the records.

    Attributes:
        applied: versions that the shard has, and that control has not heard of.
    """

    def __init__(self, conductor: Conductor, now: float) -> None:
        self.applied: list[int] = []
        self._conductor, self._now = conductor, now
        self._live = conductor.applied, conductor.tell
        conductor.clock = lambda: self._now
        conductor.applied = self._wait_for_record
        conductor.tell = lambda action: None  # operators were told when the event happened

    async def _wait_for_record(self, version: int) -> None:
        """Hold back a version until the journal has its publication."""
        self.applied.append(version)

    async def end(self) -> None:
        """Finish the shard's running work, and switch the conductor to live traffic."""
        conductor = self._conductor
        while conductor.tasks.working:
            await asyncio.wait(set(conductor.tasks.working))
        began = time.monotonic()
        conductor.clock = lambda: self._now + time.monotonic() - began
        conductor.applied, conductor.tell = self._live
        conductor.metrics.history = History()  # the journal's pushes were no traffic
        conductor.recorder.resume(
            conductor.core.state.version, self._now, conductor.core.state.samples.progress
        )
        conductor.happen(e.Restarted())
        for version in self.applied:
            await conductor.applied(version)

    async def record(self, record: Record) -> int:
        """Replay one record. Return the number of pushes that it decides on, 0 or 1."""
        conductor, fields = self._conductor, record.fields
        match record.kind:
            case r.EVENT:
                event: e.Event[Any] = fields["event"]
                self._now = fields["now"]
                conductor.core.state.roster.hear(fields.get("heard", {}))
                await self._event(event)
                return isinstance(event, e.Pushed)
            case r.PART:
                self._part(record)
            case r.CLOSED:
                key, refusal = e.PushKey(*_member(fields), fields["seq"]), fields["refusal"]
                if fields["again"]:
                    conductor.ledger.start_over(key)
                elif refusal is not None:
                    conductor.ledger.refuse(key, refusal)
                else:
                    conductor.ledger.abandon(key)
            case r.UNWANTED:
                key = e.PushKey(*_member(fields), fields["seq"])
                conductor.ledger.mark_unwanted(key, fields["assignment"])
            case r.PLAN:
                assert conductor.shard.reported.manifest is not None
                message: m.PlanAnnouncement = decode_envelope(fields["plan"], "ServerMessage")
                conductor.plans.prepare(plan_of(message, conductor.shard.reported.manifest))
            case r.BUFFERS:
                deposit = Deposit(collection=fields["collection"], values=_values(record))
                conductor.put_buffers(e.PushKey(*_member(fields), fields["seq"]), deposit)
            case r.EVALUATED:
                conductor.put_evaluated(fields["epoch"], _values(record))
            case _:
                raise ValueError(f"unknown kind of record: {record.kind!r}")
        return 0

    async def _event(self, event: e.Event[Any]) -> None:
        conductor = self._conductor
        match event:
            case e.Published():
                await self._until_applied(event.version)
                conductor.happen(event)
            case e.Pushed():
                conductor.perform(conductor.push(event)[1])
            case e.Tick():
                conductor.tick()
            case _:
                conductor.happen(event)

    async def _until_applied(self, version: int) -> None:
        """Wait until the shard has applied a version. Raises ValueError if it never will."""
        conductor = self._conductor
        while version not in self.applied:
            if conductor.tasks.failed.is_set() or not conductor.tasks.working:
                why = conductor.tasks.failure or "no record leads to it"
                raise ValueError(f"cannot replay the journal: version {version} was never produced: {why}")
            await asyncio.wait(set(conductor.tasks.working), return_when=asyncio.FIRST_COMPLETED)
        self.applied.remove(version)

    def _part(self, record: Record) -> None:
        conductor, fields, known = self._conductor, record.fields, self._conductor.shard.reported
        member = _member(fields)
        part: m.PartHeader = decode_envelope(fields["header"], "WorkerMessage")
        assert known.manifest is not None
        if part.plan != known.plan.number:
            return
        bounds = known.plan.parts[part.part]
        payloads = received_payloads(
            part.payloads,
            record.data,
            bounds,
            known.manifest,
            worker=member[0],
            coordinates=known.coordinates,
        )
        conductor.ledger.restore_part(member, part, fields["checksum"], payloads)


def _member(fields: Mapping[str, Any]) -> r.Member:
    worker, incarnation = fields["member"]
    return worker, incarnation


def _values(record: Record) -> dict[str, Any]:
    """Return the arrays that lie end to end in the data of a record, by name."""
    found: dict[str, Any] = {}
    at = 0
    for name, size in record.fields["sizes"].items():
        found[name] = record.data[at : at + size]
        at += size
    return found
