"""Random lives of a job in coded mode; `coded_histories` says what is checked."""

from __future__ import annotations

from .coded_histories import run


def test_every_sample_counts_once_and_replicas_never_differ() -> None:
    assert run(30_000, seed=1_000) > 10
