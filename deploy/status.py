"""Asks a server how its job is doing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Generator
from typing import Any

import grpc.aio

from ..proto.channel import CLIENT_OPTIONS
from ..proto.messages import StatusRequest, StatusResponse
from ..proto.service import Stub, refusal_of

TIMEOUT_SECONDS = 2.0

Ask = Callable[[], StatusResponse | None]


@contextlib.contextmanager
def asking(target: str, *, measured: bool = False, losses: bool = False) -> Generator[Ask]:
    """A function that asks the server at `target`, host:port, from a program that is not asynchronous itself.

    measured: whether also for what has been measured of its steps. losses: for how its training loss went.

    It returns the answer, or None when there is none within `TIMEOUT_SECONDS`, and raises Refused where the
    server does not want to be asked from here.
    """

    async def connect() -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(target, options=CLIENT_OPTIONS)  # belongs to the running loop

    async def ask() -> StatusResponse | None:
        try:
            reply: Any = await stub.status(
                StatusRequest(measured=measured, losses=losses), timeout=TIMEOUT_SECONDS
            )
        except grpc.aio.AioRpcError as error:
            refused = refusal_of(error)
            if refused is not None:
                raise refused from None
            return None
        return reply if isinstance(reply, StatusResponse) else None

    with asyncio.Runner() as runner:
        channel = runner.run(connect())
        stub = Stub(channel, sent=lambda _: None, received=lambda _: None)
        try:
            yield lambda: runner.run(ask())
        finally:
            runner.run(channel.close(None))
