"""Asks a server how its job is doing."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any, Self

import grpc.aio

from ..proto.channel import CLIENT_OPTIONS
from ..proto.messages import StatusRequest, StatusResponse
from ..proto.service import Stub

TIMEOUT_SECONDS = 2.0


class StatusClient:
    """Asks one server, from a program that is not asynchronous itself. A context manager."""

    def __init__(self, target: str) -> None:
        """
        Args:
            target: host:port.
        """
        self._runner = asyncio.Runner()
        self._channel: grpc.aio.Channel = self._runner.run(self._connect(target))
        self._stub = Stub(self._channel, sent=lambda _: None, received=lambda _: None)

    async def _connect(self, target: str) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(target, options=CLIENT_OPTIONS)  # belongs to the running loop

    def ask(self) -> StatusResponse | None:
        """The server's answer, or None when there is none within `TIMEOUT_SECONDS`."""
        return self._runner.run(self._ask())

    async def _ask(self) -> StatusResponse | None:
        try:
            reply: Any = await self._stub.status(StatusRequest(), timeout=TIMEOUT_SECONDS)
        except grpc.aio.AioRpcError:
            return None
        return reply if isinstance(reply, StatusResponse) else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._runner.run(self._channel.close(None))
        self._runner.close()
