"""A client of one server: it finds the server's address, connects, and makes calls.

The system's resolver finds the address, as for every other program of the machine: gRPC's own knows neither
mDNS nor the other sources of NSS. The name is resolved again for each new connection, because a server may
have moved.
"""

from __future__ import annotations

import asyncio
import contextlib

import grpc.aio
from grpc import ChannelConnectivity

from .channel import credentials_of, dial
from .findings import Target
from .reaching import address_of
from .service import Meter, Stub, ignore


class Client:
    """The connection to one server, with its stub. Belongs to one event loop."""

    def __init__(self, target: Target, *, sent: Meter = ignore, received: Meter = ignore) -> None:
        """
        Args:
            target: address of the server, and the files for access to it.
            sent, received: called with the wire size of each message, in bytes.

        Raises:
            OSError: a file of the target cannot be read.
        """
        self._target = target
        self._meters = (sent, received)
        self._files = target.read()
        self._dialled: tuple[str, grpc.aio.Channel, Stub] | None = None
        self._dialling = asyncio.Lock()

    async def stub(self) -> Stub:
        """Return the stub to make the next call with; connect first unless there is a connection.

        Raises:
            UnreachedError: the name is not found, or no address of it accepts a connection.
        """
        async with self._dialling:
            if self._dialled is not None:
                was, channel, stub = self._dialled
                state = channel.get_state()
                if state in (ChannelConnectivity.READY, ChannelConnectivity.CONNECTING):
                    return stub
                address = await asyncio.to_thread(address_of, self._target)
                if address == was and state is ChannelConnectivity.IDLE:
                    return stub
                await self._hang_up()  # the channel's own next attempt might be seconds away
            else:
                address = await asyncio.to_thread(address_of, self._target)
            with contextlib.suppress(OSError):  # they are being replaced
                self._files = self._target.read()  # certificates may have been renewed
            channel = dial(self._target, address, self._files)
            channel.get_state(try_to_connect=True)
            sent, received = self._meters
            stub = Stub(channel, sent=sent, received=received, metadata=lambda: credentials_of(self._target))
            self._dialled = address, channel, stub
            return stub

    async def renew(self) -> None:
        """Give up the connection, with all calls on it: the next call connects anew.

        A channel whose connection has ended may still take calls, and hold them until a write fails.
        """
        async with self._dialling:
            await self._hang_up()

    async def close(self) -> None:
        """End the connection and all calls on it."""
        await self._hang_up()

    async def _hang_up(self) -> None:
        if self._dialled is not None:
            dialled, self._dialled = self._dialled, None
            await dialled[1].close(None)
