"""The server's memory does not grow with the versions that it makes, nor with the workers that it sees.

As a program it makes as many versions as it is told to: `python tests/server/test_growth.py 10000`
"""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import tracemalloc

import pytest
from wired import Wired, wired

from gradwire.proto import messages as m
from gradwire.server.job import events as e

MODES = ("sync", "async", "stale:bound=2", "local:first=1,most=1")
VERSIONS = 100
MAY_GROW_BYTES = 6 << 10  # containers with room to spare; 60 bytes of each version
PROFILE = m.Profile(
    steps=60,
    forward_seconds=(0.1,),
    backward_seconds=(0.1,),
    densities=(1.0,),
    sent_bytes=12,
    compressing_seconds=0.01,
    step_seconds=0.3,
)


async def train(job: Wired, versions: int) -> None:
    """Make versions; after each, a worker leaves and another one, with a name of its own, takes its place."""
    for _ in range(versions):
        version = job.core.state.version + 1
        for worker in job.workers:
            member = job.core.state.roster.members[worker]
            if member.work is not None:
                job.arrive(worker, job.push(worker, seq=member.last_seq + 1))
        while job.core.state.version < version or job.conductor.tasks.working:
            await asyncio.sleep(0.0005)
        gone, newcomer = job.workers[0], f"w{version}"
        job.conductor.happen(e.Left(gone, 1, failed=False, reason="it is told to stop"))
        del job.conductor.streams[gone], job.sent[gone]
        job.conductor.happen(e.Joined(newcomer, 1, compressor="none"))
        job.sent[newcomer] = []
        job.attach(newcomer)
        job.conductor.plans.planner.profiled(newcomer, 1, PROFILE)
        job.conductor.happen(e.Prepared(newcomer, 1, fingerprint=b"m", version=job.core.state.version))
        job.workers = [*job.workers[1:], newcomer]
        job.conductor.happen(e.Tick())
        job.conductor.forget_gone()
        for sent in job.sent.values():
            sent.clear()


async def growth(mode: str, versions: int) -> tuple[int, str]:
    """Return by how many bytes the memory grows over so many versions, after as many, and where most."""
    tracemalloc.start()
    try:
        async with wired(mode, ["a", "b", "c"], epochs=1_000_000) as job:
            await train(job, versions)
            gc.collect()
            before, bytes_before = tracemalloc.take_snapshot(), tracemalloc.get_traced_memory()[0]
            await train(job, versions)
            gc.collect()
            grown = tracemalloc.get_traced_memory()[0] - bytes_before
            lines = tracemalloc.take_snapshot().compare_to(before, "lineno")[:8]
        return grown, "\n".join(map(str, lines))
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("mode", MODES[:2])
async def test_versions_and_workers_that_come_and_go_leave_nothing_behind(
    mode: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Lists of bounded length are made short here, so that they are full before memory is measured."""
    caplog.set_level(logging.CRITICAL, logger="gradwire")  # pytest keeps whatever is logged
    monkeypatch.setattr("gradwire.server.job.roster.DEPARTED_MEMBERS", 8)
    monkeypatch.setattr("gradwire.server.job.loss_history.POINTS", 8)
    monkeypatch.setattr("gradwire.server.history.POINTS", 8)
    grown, where = await growth(mode, VERSIONS)
    assert grown < MAY_GROW_BYTES, where


if __name__ == "__main__":
    for mode in MODES:
        grown, where = asyncio.run(growth(mode, int(sys.argv[1]) // 2))
        print(f"{mode}: {grown:+} bytes\n{where}", flush=True)
