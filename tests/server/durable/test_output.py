"""The files of --output."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]

from gradwire.proto.messages import Entry, EntryKind
from gradwire.server.durable.output import Output
from gradwire.server.durable.recorder import Recorder
from gradwire.server.shard.store import Copy


class FakeShard:
    async def copy(self, *, last: bool = False, undo: bool = False) -> Copy:
        return Copy(3, {"weight": torch.ones(2)}, "digest")


class FakeState:
    entries = (
        Entry(name="mean", kind=EntryKind.BUFFER, shape=(2,), dtype="float32"),
        Entry(name="same mean", kind=EntryKind.TIED, tied_to="mean"),
        Entry(name="same weight", kind=EntryKind.TIED, tied_to="weight"),
    )
    frozen: dict[str, Any] = {}  # noqa: RUF012

    async def of(self, epoch: int) -> Any:
        raise OSError("they are gone")


def test_parameters_are_saved_where_buffers_cannot_be_had(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shard: Any = FakeShard()
    state: Any = FakeState()
    path = tmp_path / "model.safetensors"
    output = Output(path, shard, state, Recorder(), keep_best=False)
    assert asyncio.run(output.write(1)) == "digest"
    assert "saving the parameters without buffers, which are unavailable: they are gone" in caplog.messages
    assert not output.unsaved
    assert sorted(load_file(path)) == ["same weight", "weight"]
