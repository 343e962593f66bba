"""The bench of control emulates members that train: it would measure nothing otherwise."""

from __future__ import annotations

import pytest

from gradwire.benchmarks.members import MODES, measure


@pytest.mark.parametrize("mode", [*MODES, "coded:redundancy=2"])
def test_emulated_members_train_in_every_mode(mode: str) -> None:
    job = measure(mode, 4, rounds=3)
    assert job.core.accepted_pushes >= 4
    assert job.core.version >= 1
    assert job.steps["heartbeat"] == 12
    assert bool(job.steps["packet"]) != job.core.mode.pushes_parts
