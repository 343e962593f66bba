"""Fixtures of the end-to-end tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from daemons import Daemons


@pytest.fixture
def daemons() -> Iterator[Daemons]:
    """Starts gc-server and gc-worker processes; ends what is still running."""
    started = Daemons()
    try:
        yield started
    finally:
        started.end()
