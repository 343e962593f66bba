"""A server goes on where another one was: it takes over the newest checkpoint, and lets everything that the
journal has happen again, in the same order and at the same times.

What happens is the same because it is all that control and shard depend on. Messages go nowhere meanwhile:
nobody is connected. Workers that come back find their membership, what is stored of their pushes, and the
outcomes of those that were decided on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any

from ... import failpoints
from ...proto import messages as m
from ...proto.plans import plan_of
from ...proto.refusal import Refusal, Refused
from ...proto.transfer import received_payloads
from ...proto.wire import decode_envelope
from ...saved import DamagedError, FormatError
from ..conductor import Conductor
from ..job import events as e
from ..job import saving
from ..model_state import Deposit
from . import recorder as r
from .image import restore
from .journal import JournalError, Record
from .state import StateError, StateFolder

log = logging.getLogger("gradwire.server")

_EVENTS: Mapping[str, Any] = {
    kind.__name__: kind
    for kind in vars(e).values()
    if isinstance(kind, type) and issubclass(kind, e.Event) and kind not in (e.Event, e.FromWorker)
}


# What comes of a folder that is not what a server of this release has written.
_NO_WAY_ON = (
    *(Refused, JournalError, DamagedError, FormatError, OSError),
    *(AssertionError, AttributeError, IndexError, KeyError, TypeError, ValueError),
)


async def recover(conductor: Conductor, folder: StateFolder) -> bool:
    """Have a conductor that has just been made go on. Returns whether it does: there is a checkpoint.

    Raises StateError.
    """
    began, found = time.monotonic(), await asyncio.to_thread(folder.newest)
    if found is None:
        return False
    pushes = 0
    try:
        await _take_over(conductor, found.tree)
        for record, own in folder.records(found.version):
            if not (record.fields.get("carried") and not own):
                pushes += await _again(conductor, record)
            failpoints.reached("journal.read")
        await _caught_up(conductor)
    except _NO_WAY_ON as error:
        raise StateError(
            f"--state {folder.name}: what was written down does not lead on from version {found.version}: "
            f"{error!r}; please report this"
        ) from error
    log.info(
        "checkpoint of version %d and %d pushes of the journal read in %.1f s: going on at version %d",
        *(found.version, pushes, time.monotonic() - began, conductor.core.version),
    )
    return True


async def _take_over(conductor: Conductor, tree: Mapping[str, Any]) -> None:
    """Have a conductor be as the one was that has written this down."""
    conductor.replayed = []
    conductor.clock = lambda: tree["now"]
    await restore(conductor, tree)
    if not tree["announced"]:
        conductor.replayed.append(conductor.shard.version)


async def _event(conductor: Conductor, event: e.Event[Any], now: float, heard: Mapping[str, float]) -> None:
    """heard: when members were."""
    assert conductor.replayed is not None
    conductor.clock = lambda: now
    conductor.core.roster.hear(heard)
    match event:
        case e.Published():
            while event.version not in conductor.replayed:
                if conductor.failed.is_set() or not conductor.working:
                    why = conductor.failure or "nothing leads to it"
                    raise ValueError(f"version {event.version} does not come: {why}")
                await asyncio.wait(set(conductor.working), return_when=asyncio.FIRST_COMPLETED)
            conductor.replayed.remove(event.version)
            conductor.happen(event)
        case e.Pushed():
            result = conductor.push(event)
            conductor.intake.of(event.worker, event.incarnation).close(event.seq)
            conductor.perform(result.actions)
        case e.Tick():
            conductor.happen(event)
            conductor.forget_gone()
        case _:
            conductor.happen(event)


async def _caught_up(conductor: Conductor) -> None:
    """What follows happens now."""
    while conductor.working:
        await asyncio.wait(set(conductor.working))
    published, conductor.replayed = conductor.replayed, None
    last, began = conductor.now(), time.monotonic()
    conductor.clock = lambda: last + time.monotonic() - began
    conductor.recorder.go_on(conductor.core.version, last, conductor.core.samples.progress)
    conductor.happen(e.Restarted())
    for version in published or ():
        await conductor.published(version)


async def _again(conductor: Conductor, record: Record) -> int:
    """Let what is recorded happen. Returns how many pushes were decided on."""
    fields = record.fields
    match record.what:
        case r.EVENT:
            plain = fields["event"]
            event = saving.load(_EVENTS[plain["type"]], plain)
            await _event(conductor, event, fields["now"], fields.get("heard", {}))
            return isinstance(event, e.Pushed)
        case r.PART:
            worker, incarnation = fields["member"]
            part: m.Part = decode_envelope(fields["header"], "WorkerMessage")
            shard = conductor.shard
            assert shard.manifest is not None
            if part.plan == shard.plan.number:
                bounds = shard.plan.parts[part.part]
                payloads = received_payloads(
                    part.payloads, record.data, bounds, shard.manifest, worker=worker
                )
                arrivals = conductor.intake.of(worker, incarnation)
                if fields["carried"]:  # `arrivals` know it already, or the push waits to be applied
                    key = e.PushKey(worker, incarnation, part.seq)
                    shard.put(key, part.part, payloads, part.assignment, part.learning_rates)
                elif arrivals.wants(part.seq, part.part, part.assignment):
                    arrivals.check_rates(part, max(1, len(shard.manifest.groups)))
                    conductor.intake.store((worker, incarnation), part, fields["checksum"], payloads)
        case r.CLOSED:
            worker, incarnation = fields["member"]
            refusal = saving.load(Refusal | None, fields["refusal"])
            conductor.intake.close((worker, incarnation), fields["seq"], refusal, again=fields["again"])
        case r.UNWANTED:
            worker, incarnation = fields["member"]
            conductor.intake.of(worker, incarnation).wants(fields["seq"], 0, fields["assignment"])
            conductor.intake.do_without((worker, incarnation), fields["seq"])
        case r.PLAN:
            assert conductor.shard.manifest is not None
            message: m.Plan = decode_envelope(fields["plan"], "ServerMessage")
            conductor.shard.prepare(plan_of(message, conductor.shard.manifest))
        case r.BUFFERS:
            worker, incarnation = fields["member"]
            deposit = Deposit(collection=fields["collection"], values=_values(record))
            conductor.state.put(e.PushKey(worker, incarnation, fields["seq"]), deposit)
        case r.EVALUATED:
            conductor.state.evaluated(fields["epoch"], _values(record))
        case _:
            raise ValueError(f"a record of an unknown kind {record.what!r}")
    return 0


def _values(record: Record) -> dict[str, Any]:
    found: dict[str, Any] = {}
    at = 0
    for name, size in record.fields["sizes"].items():
        found[name] = record.data[at : at + size]
        at += size
    return found
