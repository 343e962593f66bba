"""When all that there is is written down, here and at the workers: as the job begins, at versions, and before
a server that comes back stops."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from typing import TYPE_CHECKING

from ...compressors import Plan
from ...proto import messages as m
from ...proto.manifest import Manifest
from ...proto.refusal import Refused
from ..job import events as e
from ..job import refusals
from ..model_state import ModelState, Values
from ..reporting import shortened
from ..shard.shard import Image
from ..streams import WorkerStream
from .image import image_of, stored_of

if TYPE_CHECKING:
    from ..conductor import Conductor

log = logging.getLogger("gradwire.server")

POLL_S = 0.02


async def first_checkpoint(
    conductor: Conductor, manifest: Manifest, image: Image, plan: Plan, state: Values
) -> None:
    """Before control hears of the parameters. Raises Refused where it cannot be written."""
    first = ModelState()
    first.open(manifest.entries, state)
    try:
        tree = image_of(conductor, manifest, plan, image, first)
        await conductor.recorder.first(tree, conductor.now())
    except OSError as error:
        why = f"the first checkpoint cannot be written: {error}"
        conductor.recorder.broken(why)
        raise Refused(refusals.stopping("", why)) from None


async def checkpoint(conductor: Conductor, *, announced: bool) -> Awaitable[None]:
    """What control hears of from now on is in the next segment. announced: whether it has heard of the newest
    version. Returns the writing. Raises JournalError."""
    shard = conductor.shard
    image = await shard.image()
    await conductor.state.settled()
    assert shard.manifest is not None
    tree = image_of(conductor, shard.manifest, shard.plan, image, conductor.state)
    tree["announced"] = announced
    progress, version = conductor.core.samples.progress, shard.version
    stored = stored_of(conductor)
    writing = conductor.recorder.checkpoint(version, tree, stored, conductor.now(), progress)
    for stream in conductor.streams.values():
        stream.outbox.send(m.Save(version=version))
    return writing


def saved(stream: WorkerStream, message: m.Saved) -> None:
    """A worker has written down its state, or could not."""
    if message.error:
        text = "worker %r could not write down its state at version %d, and will go on without: %s"
        log.error(text, stream.worker, message.version, shortened(message.error))
    stream.saved = message.version


async def pause(conductor: Conductor, grace_s: float) -> None:
    """Let what has begun come to its end, then write all down. What takes longer than `grace_s` is as if the
    server had been killed: the journal has it."""
    conductor.happen(e.Closing())
    try:
        async with asyncio.timeout(grace_s):
            await conductor.paused.wait()
            if conductor.shard.manifest is None or conductor.finished.is_set():
                return
            await conductor.recorder.idle()
            await asyncio.shield(await checkpoint(conductor, announced=True))
            listening = [member.worker for member in conductor.core.roster.listening()]
            streams = [conductor.streams[worker] for worker in listening if worker in conductor.streams]
            while any(
                stream.saved < conductor.shard.version
                for stream in streams
                if conductor.streams.get(stream.worker) is stream
            ):
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        log.warning("the job is not at rest after %g s, and stops where it is", grace_s)
    else:
        log.info("paused at version %d; gc-server with the same --state goes on", conductor.core.version)
