"""Errors of --tensorboard; tests/end_to_end/test_notebook.py reads the curves of a job."""

from __future__ import annotations

import sys
from pathlib import Path

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
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(
        UsageError, match=r"tensorboardX is not installed; run pip install '\.\[tensorboard\]'"
    ):
        Curves(str(tmp_path), None, ServerMetrics("none"))  # type: ignore[arg-type]
