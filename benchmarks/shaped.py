"""Sync training of `layers` behind shaped links, by real daemons or by a peer, recorded."""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..deploy.processes import Child, Children
from ..settings import RunSettings
from .arguments import BenchError
from .jobs import PATIENCE_S, run_job
from .recorder import Recorder
from .star import Star
from .traces import Trace, read

WARM_UP = 3  # steps that are not counted: kernels are compiled, buckets arranged, memory is touched first
SERVER = "server"
Overlap = Literal["off", "backward", "both"]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """model: a name of `layers.shapes`. workers: how many. mbit: of each link, in each direction; 0 for as
    fast as it goes. seconds, real: of computation, see `layers.task`. steps: that are counted. part_bytes: as
    of gc-run."""

    model: str
    workers: int
    mbit: float
    seconds: float
    real: int
    steps: int
    part_bytes: int

    @property
    def all_steps(self) -> int:
        return WARM_UP + self.steps + 1


@dataclass(frozen=True)
class Recorded:
    """A run. nodes: of its network. traces: by worker."""

    nodes: Sequence[str]
    recorder: Recorder
    traces: Sequence[Trace]

    def __post_init__(self) -> None:
        for trace in self.traces:
            if len(trace) < WARM_UP + 2:
                raise BenchError(f"only {len(trace)} steps were taken; give more --steps")

    @property
    def counted(self) -> list[Trace]:
        """By worker, without the first steps."""
        return [trace[WARM_UP:] for trace in self.traces]

    @property
    def step_seconds(self) -> float:
        """The median over steps and workers."""
        pairs = itertools.chain.from_iterable(map(itertools.pairwise, self.counted))
        return statistics.median(after.began - before.began for before, after in pairs)


def run_ours(setup: Setup, compressor: str, downlink: str, overlap: Overlap) -> Recorded:
    """One job of real daemons."""
    nodes = [SERVER, *(f"worker-{rank}" for rank in range(setup.workers))]
    with Star(nodes, setup.mbit) as star, tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace"
        trace.mkdir()
        batch = setup.real or 1
        options = {
            "model": setup.model,
            "seconds": setup.seconds,
            "real": setup.real,
            "samples": setup.workers * batch * setup.all_steps,
            "trace": trace,
        }
        settings = RunSettings(
            task="gradwire.benchmarks.layers:task:" + ",".join(f"{key}={options[key]}" for key in options),
            workers=setup.workers,
            compressor=compressor,
            downlink=downlink,
            overlap=overlap,
            part_bytes=setup.part_bytes,
            epochs=1,
            batch_size=batch,
            learning_rate=1e-3,
        )
        with Recorder(star, nodes) as recorder:
            run_job(settings, Path(folder), star=star)
        return Recorded(nodes, recorder, read(trace))


def run_peer(setup: Setup, hook: str) -> Recorded:
    """The same with DistributedDataParallel, and a hook of `ddp`."""
    nodes = [f"worker-{rank}" for rank in range(setup.workers)]
    with Star(nodes, setup.mbit) as star, tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace"
        trace.mkdir()
        with Recorder(star, nodes) as recorder, Children(Path(folder)) as children:
            started = [
                children.start(
                    node,
                    "gradwire.benchmarks.ddp",
                    [
                        *_computation(setup, trace),
                        *(str(rank), str(setup.workers), f"{star.address(nodes[0])}:29500", hook),
                    ],
                    (*star.prefix(node), "env", "GLOO_SOCKET_IFNAME=eth0"),
                )
                for rank, node in enumerate(nodes)
            ]
            _await(started)
        return Recorded(nodes, recorder, read(trace))


def _computation(setup: Setup, trace: Path) -> list[str]:
    """The arguments of `ddp` that come first."""
    return [setup.model, str(setup.seconds), str(setup.real), str(trace), str(setup.all_steps)]


def _await(started: Sequence[Child]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while any(child.code is None for child in started):
        ended = [child for child in started if child.code not in (None, 0)]
        if ended or time.monotonic() > deadline:
            why = (ended or started)[0]
            raise BenchError(f"{why.name} did not end as it should: {why.ending}: {why.last_lines()}")
        time.sleep(0.1)
