"""Fixtures of the end-to-end tests."""

from __future__ import annotations

from collections.abc import Iterator

import forkserver
import pytest
from daemons import Daemons, Server


@pytest.fixture(scope="session", autouse=True)
def end_of_forks() -> Iterator[None]:
    """Ends the process that daemons are forked from."""
    yield
    forkserver.end()


@pytest.fixture
def daemons() -> Iterator[Daemons]:
    """Starts gc-server and gc-worker processes; ends what is still running."""
    started = Daemons()
    try:
        yield started
    finally:
        started.end()


@pytest.fixture
def plain_daemons() -> Iterator[Daemons]:
    """The same with new interpreters, as the commands have them."""
    started = Daemons(forkserver.plain)
    try:
        yield started
    finally:
        started.end()


@pytest.fixture
def address(daemons: Daemons) -> str:
    """Starts a server that begins with one worker."""
    server: Server = daemons.server("--min-workers", "1", "--task", "digits")
    return server.address
