"""Parameters on slow links: the initial upload, and Fetch."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
from daemons import Daemons, beating, poll, refusing, talk
from relay import Relay

from gradwire import __version__
from gradwire.proto import messages as m
from gradwire.proto.manifest import Manifest
from gradwire.proto.service import ignore
from gradwire.proto.transfer import encode_chunks
from gradwire.worker.session.connection import Connection

MANIFEST = Manifest((m.Tensor(name="weight", shape=(12, 1 << 17), dtype="float32"),), 64)


async def test_an_upload_renews_the_lease_and_a_stalled_fetch_holds_up_nobody(daemons: Daemons) -> None:
    """Heartbeats wait behind the upload on a slow link: a worker was lost in the middle of it (finding F10).
    One client that read no further kept every other one from fetching (finding F9)."""
    server, waits = daemons.server("--lease-seconds", "3"), list[str]()

    async def upload(header: m.InitializeHeader) -> AsyncIterator[Any]:
        yield header
        for number, message in enumerate(
            encode_chunks(0, [np.zeros(spec.elements * 4, np.uint8) for spec in MANIFEST.specs])
        ):
            await asyncio.sleep(0.5)
            if number == 9:
                waits.append((await raw.stub.status(m.StatusRequest())).waiting)
            yield message

    async def fetched(stub: Any, *, chunks: int) -> Any:
        call = stub.fetch(m.FetchRequest(job=""))
        header = await call.read()
        assert isinstance(header, m.FetchHeader)
        for _ in range(chunks):
            assert isinstance(await call.read(), m.Chunk)
        return call

    async with talk(server.address) as make, talk(server.address) as make_other:
        raw = make()
        await raw.join()
        await raw.attach()
        await raw.receive(m.Welcome)
        header = m.InitializeHeader(
            job=raw.job, worker=raw.worker, incarnation=raw.incarnation, manifest=MANIFEST.to_message()
        )
        await refusing(raw.stub.initialize(upload(header), timeout=60))
        async with beating(raw):
            stalled = await fetched(make_other().stub, chunks=0)
            call = await asyncio.wait_for(fetched(raw.stub, chunks=12), 15)
            assert not await call.read()
            stalled.cancel()
    (waiting,) = waits
    assert re.search(r"to upload the initial parameters; (67|75)% of 6\.3 MB arrived", waiting)
    assert "is lost" not in server.log


def test_an_upload_that_breaks_continues_and_may_take_longer_than_the_time_to_reconnect(
    daemons: Daemons,
) -> None:
    """It began anew from byte 0, and only if it had begun less than `--give-up-seconds` before."""
    server = daemons.server("--entropy", "off")  # zeros would arrive at once
    relay = Relay(server.port, up_per_s=3e6)
    connection = Connection(
        f"127.0.0.1:{relay.port}",
        worker="w0",
        incarnation=1,
        connect_s=20.0,
        give_up_s=0.5,
        sent=ignore,
        received=ignore,
    )
    values = [np.zeros(spec.elements * 4, np.uint8) for spec in MANIFEST.specs]
    size = sum(map(len, values))

    def cut() -> None:
        for share in (0.5, 0.9):
            poll(lambda: relay.up > share * size, f"{share:.0%} of the upload")  # noqa: B023
            relay.cut()

    cutting = threading.Thread(target=cut)
    cutting.start()
    try:
        connection.join(__version__, "", ())
        assert connection.initialize(MANIFEST, values)
        cutting.join()
    finally:
        connection.close()
        relay.close()
    assert relay.up < 1.5 * size
    server.wait_for("model received")
