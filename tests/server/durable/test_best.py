"""The best version in --state: as it was evaluated, until there is a better one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from pushes import MANIFEST, assembly
from wired import PLAN

from gradwire.proto import plans
from gradwire.server.durable.best import BestCheckpoint, BestFile
from gradwire.server.durable.folder import StateFolder
from gradwire.server.durable.recorder import Recorder
from gradwire.server.durable.resuming import read_model
from gradwire.server.job.events import Apply
from gradwire.server.shard.local import LocalShard
from gradwire.server.shard.model_state import ModelState

from .test_recovery import remembering


@pytest.mark.parametrize("kind", ["disk", "url"])
def test_the_best_version_stays_until_there_is_a_better_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(plans, "ALIGNMENT", 1)  # parts of one element
    where = str(tmp_path) if kind == "disk" else f"file://{tmp_path}"

    async def run() -> None:
        folder, shard = StateFolder(where, syncs=False), LocalShard(remembering)
        await shard.open(MANIFEST, assembly(1, 2, 3), PLAN, lambda: None)
        best = BestCheckpoint(Recorder(folder, job="job", recorded=False), shard, ModelState())
        for epoch, better in ((1, True), (2, False), (3, True), (4, False)):
            best.evaluated(epoch, shard.reported.version)
            version = shard.reported.version
            order = Apply(version=version + 1, contributions=(), rate_factor=1.0, opened_at=0.0)
            await shard.apply(order, [], lambda part: None)
            if better:
                best.best(epoch, version)
            best.judged()
            await best.close()
            (kept,) = tmp_path.glob("best-*")
            assert kept.name == f"best-{(0 if epoch < 3 else 2):010d}"
            found = read_model(f"{where}/{kept.name}")
            assert found.version == (0 if epoch < 3 else 2)
            assert found.moments is not None
            assert found.moments["weight"].spec.startswith("adam:")
        best.best(4, 3)  # judged already: as after a restart, nothing is known of it
        await best.close()
        assert len(list(tmp_path.glob("best-*"))) == 1
        shard.close()

    asyncio.run(run())


def test_a_best_version_that_cannot_be_kept_as_a_file_is_said_and_the_rest_is_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "best.safetensors").mkdir()

    async def run() -> None:
        shard, state = LocalShard(remembering), ModelState()
        await shard.open(MANIFEST, assembly(1, 2, 3), PLAN, lambda: None)
        state.open(MANIFEST.entries, {})
        best = BestFile(tmp_path / "best.safetensors", shard, state)
        best.evaluated(1, 0)
        best.best(1, 0)
        await best.close()
        shard.close()

    asyncio.run(run())
    assert "could not save version 0, the best so far" in caplog.text
