"""Checkpoints of the server and the workers: when the job begins, at versions, and before a stop of the
server that will be resumed. The file `image` has their content.

A checkpoint is taken between a version's last part and the event that announces the version, when no step is
under way. Stored parts of open pushes are carried over into the new segment of the journal. When the server
tells workers (`Save`), they save the state that they alone have (`worker/session/own_state`). They do so at
the same version, before they compute anything at it. Another thread writes the server's checkpoint. Training
does not wait for it, nor does the process when it ends. Before a stop, control assigns no more work
(`PauseRequested`) and reports when no work is left (`Paused`); then server and workers write.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable

from ...common.parts import Plan
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

POLL_S = 0.02  # interval at which `pause` looks whether workers have saved


async def first_checkpoint(
    conductor: Conductor, manifest: Manifest, image: Image, plan: Plan, state: Values
) -> None:
    """Write the checkpoint of version 0, before control hears of the parameters. Raises Refused if the
    checkpoint cannot be written, so the server stops. image: image of the shard at version 0."""
    first = ModelState()
    first.open(manifest.entries, state)
    try:
        tree = image_of(conductor, manifest, plan, image, first)
        await conductor.recorder.first(tree, conductor.now())
    except OSError as error:
        why = f"cannot write the first checkpoint: {error}"
        conductor.recorder.broken(why)
        raise Refused(refusals.stopping("", why)) from None


async def checkpoint(conductor: Conductor, *, announced: bool = False) -> Awaitable[None]:
    """Begin a new segment of the journal, start to write a checkpoint of the present state, and tell workers
    to save.

    Args:
        announced: True if control has heard of the newest version.

    Returns:
        The task that writes the checkpoint. It works on a copy, so the state may change before it is done.

    Raises:
        JournalError: the journal cannot be written.
    """
    shard = conductor.shard
    image = await shard.image()
    await conductor.state.settled()
    assert shard.reported.manifest is not None
    tree = image_of(conductor, shard.reported.manifest, shard.reported.plan, image, conductor.state)
    tree["announced"] = announced
    progress, version = conductor.core.state.samples.progress, shard.reported.version
    stored = conductor.ledger.stored_parts(shard.reported.plan.number)
    writing = conductor.recorder.checkpoint(version, tree, stored, conductor.now(), progress)
    for stream in conductor.streams.values():
        stream.outbox.send(m.Save(version=version))
    return writing


async def pause(conductor: Conductor, grace_s: float) -> None:
    """Apply the accepted pushes, then save the states of server and workers, so that the job can be resumed.

    After `grace_s` seconds it gives up. The server then ends as if it was killed, and the next one replays
    the journal."""
    conductor.happen(e.PauseRequested())
    state = conductor.core.state
    if state.apart and not conductor.paused.is_set():  # no work is assigned until all have returned
        log.info("stopping before all workers have returned; the journal has the job's state")
        return
    try:
        async with asyncio.timeout(grace_s):
            await conductor.paused.wait()
            if conductor.shard.reported.manifest is None or conductor.finished.is_set():
                return
            await conductor.recorder.idle()
            await asyncio.shield(await checkpoint(conductor, announced=True))
            listening = [member.worker for member in conductor.core.state.roster.listening()]
            streams = [conductor.streams[worker] for worker in listening if worker in conductor.streams]
            while any(
                stream.saved < conductor.shard.reported.version
                for stream in streams
                if conductor.streams.get(stream.worker) is stream
            ):
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        log.warning("could not pause the job within %g s; stopping now, the journal has its state", grace_s)
    else:
        log.info(
            "paused at version %d; gc-server with the same --state resumes it", conductor.core.state.version
        )
