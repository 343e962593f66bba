"""Places that hang, and checkpoints that are there already."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from gradwire.common.spec import parse_length
from gradwire.server.durable import recorder as module
from gradwire.server.durable.folder import StateFolder
from gradwire.server.durable.recorder import Recorder


async def test_a_place_that_hangs_is_told_of_and_nothing_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.1)
    folder, hanging = StateFolder("memory://bucket/hangs", syncs=False), threading.Event()
    write, entered = folder.write, list[int]()

    def writes(*arguments: object) -> int:
        entered.append(1)
        hanging.wait(60)
        return write(*arguments)  # type: ignore[arg-type]

    recorder = Recorder(folder, parse_length("1steps"), job="job", recorded=False)
    hanging.set()
    await recorder.first({}, 0.0)
    hanging.clear()
    monkeypatch.setattr(folder, "write", writes)
    writing = recorder.checkpoint(1, {}, (), 1.0, 0.0)
    await asyncio.sleep(0.4)
    assert recorder.failures == 1
    assert "the checkpoint of version 1 is not written after 0 s" in recorder.failing
    assert not recorder.due(9, 9.0, 0.0)  # no second one hangs beside it
    hanging.set()
    await writing
    assert (recorder.failing, recorder.version) == ("", 1)
    assert recorder.due(9, 9.0, 0.0)

    hanging.clear()
    recorder.checkpoint(9, {}, (), 9.0, 0.0)
    await asyncio.sleep(0.1)
    await asyncio.wait_for(recorder.close(), 10)
    hanging.set()


async def test_a_place_that_hangs_as_a_job_begins_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.1)
    folder, hanging = StateFolder("memory://bucket/hangs_first", syncs=False), threading.Event()

    def writes(*_: object) -> int:
        hanging.wait(60)
        return 0

    monkeypatch.setattr(folder, "write", writes)

    recorder = Recorder(folder, parse_length("1steps"), job="job", recorded=False)
    with pytest.raises(OSError, match="no answer within 0 s"):
        await recorder.first({}, 0.0)
    hanging.set()


async def test_without_a_journal_a_checkpoint_that_is_there_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that stops at its last checkpoint's version, perhaps without the time to write another one."""
    folder, written = StateFolder(tmp_path, syncs=False), list[int]()
    write = folder.write

    def writes(version: int, tree: object, about: dict[str, object]) -> int:
        written.append(version)
        return write(version, tree, about)

    monkeypatch.setattr(folder, "write", writes)

    recorder = Recorder(folder, parse_length("1steps"), job="job", recorded=False)
    await recorder.first({}, 0.0)
    for version in (1, 1, 2):
        await recorder.checkpoint(version, {}, (), 1.0, 0.0)
    again = Recorder(folder, parse_length("1steps"), job="job", recorded=False)
    again.resume(2, 2.0, 0.0)
    await again.checkpoint(2, {}, (), 3.0, 0.0)
    await recorder.close()
    assert written == [0, 1, 2]
