"""The notebook in examples/, cell by cell, in a job whose curves the server writes for TensorBoard."""

from __future__ import annotations

import importlib
import struct
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from daemons import Daemons, stop

STEPS = 11  # in an epoch of 1408 samples


def points(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Step and value of each point, by tag, of the one event file in a folder."""
    events: Any = importlib.import_module("tensorboardX.proto.event_pb2")
    (file,) = folder.iterdir()
    data, at, found = file.read_bytes(), 0, defaultdict[str, list[tuple[int, float]]](list)
    while at < len(data):  # length and its checksum, record and its checksum
        (size,) = struct.unpack_from("<Q", data, at)
        event = events.Event.FromString(data[at + 12 : at + 12 + size])
        for value in event.summary.value:
            found[value.tag].append((event.step, value.simple_value))
        at += 16 + size
    return found


def test_its_cells_train_are_interrupted_and_run_again(daemons: Daemons, tmp_path: Path) -> None:
    options = ("--epochs", "20", "--batch-size", "128", "--compressor", "none")
    server = daemons.server("--script", *options, "--tensorboard", str(tmp_path / "curves"))
    notebook = daemons.program("script_notebook", "run", server.address)
    assert notebook.wait() == 0, notebook.log
    found = {name: notebook.fields(f"^{name}$") for name in ("interrupted", "train", "continue", "again")}
    versions = {name: each["version"] for name, each in found.items()}
    assert versions == {"interrupted": 9, "train": 2 * STEPS, "continue": 4 * STEPS, "again": 6 * STEPS}
    assert found["continue"]["steps"] == 4 * STEPS + 1  # one is begun twice
    assert notebook.fields("^connected$")["version"] == 4 * STEPS
    assert found["again"]["accuracy"] > 0.75
    server.wait_for(r"rank 0 \(.*\) left: the script has ended")
    stop(server)
    curves = points(tmp_path / "curves")
    assert [step for step, _ in curves["loss/training"]] == [*range(1, 6 * STEPS + 1)]
    evaluated = dict(curves["evaluation/accuracy"])
    assert evaluated[2 * STEPS] == pytest.approx(found["train"]["accuracy"])
    assert curves["bytes/up"][-1][0] == curves["job/epoch"][-1][0] == 6 * STEPS
