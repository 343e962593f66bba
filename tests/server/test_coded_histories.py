"""Random lives of a job in coded mode; `coded_histories` says what is checked."""

from __future__ import annotations

import pytest

from .coded_histories import run


@pytest.mark.parametrize("seed", [1_000, 2_000])
def test_every_sample_counts_once_and_replicas_never_differ(seed: int) -> None:
    assert run(30_000, seed) > 10
