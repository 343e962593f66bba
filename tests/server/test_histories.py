"""The promises of every mode, over random histories; `histories` says what is checked after each step."""

from __future__ import annotations

import pytest
from world import mode_of

from gradwire.server.job.modes import registry

from .histories import MODES, run

SHARE = 6_000  # of each setting, 72,000 together; `make soak` takes ten million


@pytest.mark.parametrize("mode", MODES)
def test_random_histories_keep_every_promise(mode: str) -> None:
    steps, applied = run(mode, SHARE, seed=1)
    assert steps >= SHARE
    assert applied > SHARE / 40, "the histories never got going"


def test_every_mode_has_its_histories() -> None:
    told = {mode_of(mode).partition(":")[0] for mode in MODES}
    assert told | {"coded"} == registry.MODES.keys()  # coded mode has some of its own
