"""A server takes over a URL at which the previous server is still writing."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
import torch

from gradwire.server.durable.folder import StateError, StateFolder


@pytest.fixture
def url() -> str:
    return f"memory://bucket/{uuid.uuid4().hex}"


def tree(version: int, server: str) -> dict[str, Any]:
    return {"by": f"{server} at {version}", "tensor": torch.zeros(2)}


def folder(url: str) -> StateFolder:
    return StateFolder(url, syncs=False)


def recovered(folder: StateFolder) -> str:
    found = folder.newest()
    assert found is not None
    by: str = found.tree["by"]
    return by


def test_a_checkpoint_written_between_recovery_and_claim_stops_the_start(url: str) -> None:
    before = folder(url)
    assert before.newest() is None
    before.claim()
    before.write(40, tree(40, "before"), {})
    late = folder(url)
    assert recovered(late) == "before at 40"
    before.write(50, tree(50, "before"), {})
    with pytest.raises(StateError, match=r"another server wrote .* version 50, .* version 40; restart"):
        late.claim()
    with pytest.raises(OSError, match="another gc-server has taken over this URL"):
        before.write(60, tree(60, "before"), {})
    again = folder(url)
    assert recovered(again) == "before at 50"
    again.claim()
    again.write(51, tree(51, "again"), {})
    assert recovered(folder(url)) == "again at 51"


def test_a_job_that_began_between_recovery_and_claim_stops_the_start(url: str) -> None:
    first, second = folder(url), folder(url)
    assert first.newest() is None
    assert second.newest() is None
    first.claim()
    first.write(0, tree(0, "first"), {})
    with pytest.raises(StateError, match=r"the newest is version 0, and this server recovered none"):
        second.claim()
