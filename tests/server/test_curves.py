"""Errors of --tensorboard; tests/end_to_end/test_notebook.py reads the curves of a job."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gradwire.common.configuration import UsageError
from gradwire.server.curves import Curves
from gradwire.server.metrics import ServerMetrics


def test_a_missing_package_and_a_folder_that_is_a_file_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = tmp_path / "file"
    taken.touch()
    with pytest.raises(UsageError, match=r"--tensorboard .*file: .*; name another folder"):
        Curves(str(taken), None, ServerMetrics("none"))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "tensorboardX.record_writer", None)
    with pytest.raises(
        UsageError, match=r"tensorboardX is not installed; run pip install '\.\[tensorboard\]'"
    ):
        Curves(str(tmp_path), None, ServerMetrics("none"))  # type: ignore[arg-type]


def test_a_full_disk_ends_the_curves_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    state = SimpleNamespace(evaluations=SimpleNamespace(newest=0, done=[]), version=0)
    core: Any = SimpleNamespace(state=state)
    curves = Curves(str(tmp_path), core, ServerMetrics("none"))

    def flush(_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("tensorboardX.record_writer.RecordWriter.flush", flush)

    async def job() -> None:
        await curves.draw()
        await curves.close()

    monkeypatch.setattr("gradwire.server.curves.EVERY_S", 0.0)
    with caplog.at_level(logging.WARNING):
        asyncio.run(job())
    assert [each.getMessage() for each in caplog.records] == [
        f"--tensorboard {tmp_path}: No space left on device; this server writes no more curves"
    ]
