"""Checkpoints of the server and the workers: as the job begins, at versions, and before a server stops that
will come back. `image` has what they hold.

A checkpoint is taken between a version's last part and the event that announces the version, when nothing is
half done; stored parts of open pushes are carried over into the new segment of the journal. Workers write
down what they alone have (`worker/session/own_state`) when told to (`Save`), at the same version, before they
compute anything at it. Another thread writes the server's: training does not wait for it, and the process
does not either when it ends. Before a stop control gives out no more work (`PauseRequested`) and says when
nothing is under way (`Paused`); then both sides write.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable

from ...compressors import Plan
from ...proto import messages as m
from ...proto.manifest import Manifest
from ...proto.refusal import Refused
from ..conductor import Conductor
from ..job import events as e
from ..job import refusals
from ..shard.model_state import ModelState, Values
from ..shard.shard import Image
from .image import image_of

log = logging.getLogger("gradwire.server")

POLL_S = 0.02


async def first_checkpoint(
    conductor: Conductor, manifest: Manifest, image: Image, plan: Plan, state: Values
) -> None:
    """Write the checkpoint of version 0, before control hears of the parameters. Raises Refused if it cannot
    be written."""
    first = ModelState()
    first.open(manifest.entries, state)
    try:
        tree = image_of(conductor, manifest, plan, image, first)
        await conductor.recorder.first(tree, conductor.now())
    except OSError as error:
        why = f"the first checkpoint cannot be written: {error}"
        conductor.recorder.broken(why)
        raise Refused(refusals.stopping("", why)) from None


async def checkpoint(conductor: Conductor, *, announced: bool = False) -> Awaitable[None]:
    """Begin a new segment of the journal, and write a checkpoint of all that came before it.

    Args:
        announced: whether control has heard of the newest version.

    Returns:
        The writing, once the state may change again.

    Raises:
        JournalError: the journal cannot be written.
    """
    shard = conductor.shard
    image = await shard.image()
    await conductor.state.settled()
    assert shard.reported.manifest is not None
    tree = image_of(conductor, shard.reported.manifest, shard.reported.plan, image, conductor.state)
    tree["announced"] = announced
    progress, version = conductor.core.samples.progress, shard.reported.version
    stored = conductor.ledger.stored_parts(shard.reported.plan.number)
    writing = conductor.recorder.checkpoint(version, tree, stored, conductor.now(), progress)
    for stream in conductor.streams.values():
        stream.outbox.send(m.Save(version=version))
    return writing


async def pause(conductor: Conductor, grace_s: float) -> None:
    """Let what has begun end, then have server and workers write down their states. What takes longer than
    `grace_s` ends as if the server was killed: the journal has it."""
    conductor.happen(e.PauseRequested())
    try:
        async with asyncio.timeout(grace_s):
            await conductor.paused.wait()
            if conductor.shard.reported.manifest is None or conductor.finished.is_set():
                return
            await conductor.recorder.idle()
            await asyncio.shield(await checkpoint(conductor, announced=True))
            listening = [member.worker for member in conductor.core.roster.listening()]
            streams = [conductor.streams[worker] for worker in listening if worker in conductor.streams]
            while any(
                stream.saved < conductor.shard.reported.version
                for stream in streams
                if conductor.streams.get(stream.worker) is stream
            ):
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        log.warning("the job is not at rest after %g s, and stops where it is", grace_s)
    else:
        log.info("paused at version %d; gc-server with the same --state goes on", conductor.core.version)
