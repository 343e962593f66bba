"""A connection's statements about its replica, in any order in which its two threads hear of something."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from gradwire.proto import messages as m
from gradwire.worker.session.connection import Connection


@pytest.fixture
def connection() -> Iterator[Connection]:
    """One that has not joined."""

    def count(_: int) -> None:
        pass

    made = Connection(
        "127.0.0.1:1", worker="w0", incarnation=1, connect_s=1.0, give_up_s=1.0, sent=count, received=count
    )
    yield made
    made.close()


class Loop:
    """Stand-in for the connection's own thread."""

    def __init__(self, connection: Connection) -> None:
        self._inner: Any = connection

    def arrives(self, message: m.ServerMessage) -> None:
        async def stream() -> AsyncIterator[m.ServerMessage]:
            yield message

        self._inner._call(self._inner._stream.read(stream(), asyncio.Event()))

    @property
    def version(self) -> int | None:
        """Version that the next stream claims."""

        async def version() -> int | None:
            found: int | None = self._inner._outgoing.version
            return found

        found: int | None = self._inner._call(version())
        return found


def test_a_version_that_the_server_has_lost_is_not_claimed_again(connection: Connection) -> None:
    """The owner's thread takes in an update while the connection hears that its version is lost."""
    loop = Loop(connection)
    connection.stepped(5)
    loop.arrives(m.Welcome(rank=0, version=3, last_seq=0, newest=3))
    connection.stepped(6)  # before the owner has heard of it
    assert loop.version is None
    assert isinstance(connection.next(1.0), m.Welcome)
    connection.stepped(3)  # by a snapshot
    assert loop.version == 3
    connection.stepped(4)
    loop.arrives(m.Welcome(rank=0, version=4, last_seq=0, newest=5))
    assert loop.version == 4


def test_a_connection_is_away_until_the_server_has_answered(connection: Connection) -> None:
    assert connection.away_s > 0
    Loop(connection).arrives(m.Welcome(rank=0, version=3, last_seq=0, newest=3))
    assert connection.away_s == 0
