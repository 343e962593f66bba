"""A small share of `make kills ARGS=--workers`."""

from __future__ import annotations

from pathlib import Path

from kills import Job, killed, replayed


def test_what_comes_out_after_kills_of_server_and_workers_is_what_the_log_comes_to(tmp_path: Path) -> None:
    """And all outcomes that workers were told are in it."""
    job = Job(tmp_path, 3, 3, lasting=True)
    try:
        killed(job, 4, workers=True)
        found = job.finish()
    finally:
        job.end()
    replay = replayed(job)
    assert replay.reference.version == found.version
    assert replay.reference.sha256() == found.parameters_sha256
    assert replay.check_told(job.told) > 0
