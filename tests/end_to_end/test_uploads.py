"""Parameters on slow links: the initial upload, and Fetch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
from daemons import Daemons, beating, refusing, talk

from gradwire.proto import messages as m
from gradwire.proto.manifest import Manifest
from gradwire.proto.transfer import encode_chunks

MANIFEST = Manifest((m.Tensor(name="weight", shape=(12, 1 << 17), dtype="float32"),), 64)


async def test_an_upload_renews_the_lease_and_a_stalled_fetch_holds_up_nobody(daemons: Daemons) -> None:
    """Heartbeats wait behind the upload on a slow link: a worker was lost in the middle of it (finding F10).
    One client that read no further kept every other one from fetching (finding F9)."""
    server = daemons.server("--lease-seconds", "3")

    async def upload(header: m.InitializeHeader) -> AsyncIterator[Any]:
        yield header
        for message in encode_chunks(0, [np.zeros(spec.elements * 4, np.uint8) for spec in MANIFEST.specs]):
            await asyncio.sleep(0.5)
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
            job=raw.job,
            worker=raw.worker,
            incarnation=raw.incarnation,
            manifest=MANIFEST.to_message(),
        )
        await refusing(raw.stub.initialize(upload(header), timeout=60))
        async with beating(raw):
            stalled = await fetched(make_other().stub, chunks=0)
            call = await asyncio.wait_for(fetched(raw.stub, chunks=12), 15)
            assert not await call.read()
            stalled.cancel()
    assert "is lost" not in server.log
