"""Sync training of `layers` behind shaped links, by real daemons or by a peer, with recorded traffic and
usage.
"""

from __future__ import annotations

import itertools
import re
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..common.parts import Plan, divide
from ..compressors import parse_compressor
from ..planning.step import Overlap
from ..proto.messages import Phase, StatusResponse
from ..settings import RunSettings
from .arguments import BenchError
from .jobs import PATIENCE_S, nodes_of, run_job, run_ranks
from .layers import sizes
from .recorder import LinkRecorder
from .star import Star
from .traces import Trace, read

# Steps that are not counted: kernels are compiled, buckets arranged, memory is touched, and shares found.
WARM_UP = 10
SERVER = "server"
# Emulated computation while the exchange is measured. It is long enough for the update to reach the last
# worker before the first one pushes again.
PAUSE_S = 0.25
METRICS_PORT = 9464  # of the server, in a network of its own
RANKS_PORT = 29500  # of rank 0 of a peer, in a network of its own
ASK_EVERY_S = 0.5  # between two requests for the server's metrics


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A training job on shaped links. Fields that are not listed are options of gc-run.

    Attributes:
        model: name of a layer table of `planning.models`.
        mbit: Mbit/s of each link in each direction; 0 for no limit.
        steps: number of counted steps; local steps in local mode.
        seconds: emulated computation per step.
        loss: factor of the emulated loss in each step.
        epochs: number of epochs that all steps make.
        warm_up: number of steps before the counted ones.
    """

    model: str
    workers: int
    mbit: float
    steps: int
    seconds: float = 0.0
    part_bytes: int = 0
    fusion: str = "bytes"
    order: str = "fifo"
    mode: str = "sync"
    schedule: str = "constant"
    epochs: int = 1
    loss: float = 1.0
    warm_up: int = WARM_UP

    @property
    def all_steps(self) -> int:
        """Number of steps in a run: warm-up, counted steps, and one that ends the last counted one."""
        return self.warm_up + self.steps + 1

    def plan(self, compressor: str) -> Plan:
        """Return the plan of a job with this compressor: the division of the model into parts."""
        return divide(
            sizes(self.model), self.part_bytes, least_bytes=parse_compressor(compressor).least_part_bytes
        )


@dataclass(frozen=True)
class Recorded:
    """A recorded run of a setup, by real daemons or by a peer.

    Attributes:
        traces: times of each worker's computation.
        warm_up: number of steps that are not counted.
        parts: number of parts in the last plan; 0 for a peer.
        predicted_seconds: the server's last prediction of a step; 0 for a peer.
    """

    nodes: Sequence[str]
    recorder: LinkRecorder
    traces: Sequence[Trace]
    warm_up: int = WARM_UP
    parts: int = 0
    predicted_seconds: float = 0.0

    def __post_init__(self) -> None:
        for trace in self.traces:
            if len(trace) < self.warm_up + 2:
                least = self.warm_up + 2
                raise BenchError(f"only {len(trace)} steps were taken, expected {least}; give more --steps")

    @property
    def counted(self) -> list[Trace]:
        """Each worker's trace without the steps of the warm-up."""
        return [trace[self.warm_up :] for trace in self.traces]

    @property
    def step_seconds(self) -> float:
        """Median seconds of a step, over all counted steps and workers."""
        pairs = itertools.chain.from_iterable(map(itertools.pairwise, self.counted))
        return statistics.median(after.began - before.began for before, after in pairs)

    @property
    def first_seconds(self) -> float:
        """Seconds of the first step, from the time at which the last worker has the parameters and begins."""
        first, second = (max(trace[number].began for trace in self.traces) for number in (0, 1))
        return second - first

    @property
    def bytes_in(self) -> float:
        """Bytes that the server receives per step, with all headers."""
        first = self.counted[0]
        received, _ = self.recorder.carried_between(SERVER, first[0].began, first[-1].began)
        return received / (len(first) - 1)

    @property
    def computing_seconds(self) -> float:
        """Median seconds of computation in a step, over all counted steps and workers."""
        return statistics.median(step.seconds for trace in self.counted for step in trace)


def run_ours(setup: Setup, compressor: str, downlink: str, overlap: Overlap) -> Recorded:
    """Run one job of real daemons, and return the recorded run.

    Args:
        compressor: spec of the compressor of gradients.
        downlink: spec of the compressor of updates.
    """
    nodes = nodes_of(setup.workers)
    with Star(nodes, setup.mbit) as star, tempfile.TemporaryDirectory() as folder:
        trace = _trace_in(folder)
        options = {
            "model": setup.model,
            "seconds": setup.seconds,
            "loss": setup.loss,
            "samples": setup.workers * setup.all_steps // setup.epochs,
            "trace": trace,
        }
        settings = RunSettings(
            task="gradwire.benchmarks.layers:task:" + ",".join(f"{key}={options[key]}" for key in options),
            workers=setup.workers,
            compressor=compressor,
            downlink=downlink,
            overlap=overlap,
            part_bytes=setup.part_bytes,
            fusion=setup.fusion,
            order=setup.order,
            # No new plan after those of the first steps and of the first 50: measured steps have one plan.
            replan="never",
            mode=setup.mode,
            schedule=setup.schedule,
            epochs=setup.epochs,
            batch_size=1,
            learning_rate=1e-3,
            http_port=METRICS_PORT,
        )
        asked = _Metrics(f"http://{star.address(SERVER)}:{METRICS_PORT}/metrics")
        with LinkRecorder(star, nodes) as recorder:
            run_job(settings, Path(folder), star=star, watch=asked)
        return Recorded(
            nodes,
            recorder,
            read(trace),
            setup.warm_up,
            int(asked.of("parts")),
            asked.of("predicted_step_seconds"),
        )


class _Metrics:
    """A callback for `run_job` that fetches a server's metrics now and then while the job runs."""

    def __init__(self, url: str) -> None:
        self._url, self._at, self._text = url, 0.0, ""

    def __call__(self, status: StatusResponse, job: object) -> None:
        """Called with every status: fetch the metrics if the last request is long enough ago."""
        if status.phase is Phase.RUNNING and time.monotonic() > self._at + ASK_EVERY_S:
            self._at = time.monotonic()
            with urllib.request.urlopen(self._url, timeout=PATIENCE_S) as answer:
                self._text = answer.read().decode()

    def of(self, name: str) -> float:
        """Return the last value of the server's metric `name`, without its prefix; 0 if there was none."""
        found = re.search(rf"^gradwire_server_{name}(?:{{.*}})? (\S+)$", self._text, re.M)
        return float(found[1]) if found else 0.0


def run_peer(setup: Setup, hook: str) -> Recorded:
    """Train with torch's DistributedDataParallel instead of our daemons and return the recorded run.

    Args:
        setup: the job.
        hook: name of a communication hook, as the program `ddp` takes it.
    """
    _, *nodes = nodes_of(setup.workers)
    with Star(nodes, setup.mbit) as star, tempfile.TemporaryDirectory() as folder:
        trace = _trace_in(folder)
        world = (str(setup.workers), f"{star.address(nodes[0])}:{RANKS_PORT}", hook)
        with LinkRecorder(star, nodes) as recorder:
            run_ranks(
                nodes,
                "gradwire.benchmarks.ddp",
                lambda rank: [*_computation(setup, trace), str(rank), *world],
                Path(folder),
                star=star,
            )
        return Recorded(nodes, recorder, read(trace), setup.warm_up)


def exchange_seconds(setup: Setup, compressor: str, downlink: str) -> float:
    """Measure the exchange of a job, and return its seconds: those of a step without overlap, less those of
    its computation."""
    exchange = run_ours(replace(setup, seconds=PAUSE_S), compressor, downlink, "off")
    return exchange.step_seconds - exchange.computing_seconds


def compute_alone(setup: Setup) -> list[Trace]:
    """Have all workers compute at the same time without any exchange, and return each worker's trace."""
    _, *nodes = nodes_of(setup.workers)
    with tempfile.TemporaryDirectory() as folder:
        trace = _trace_in(folder)
        arguments = _computation(setup, trace)
        run_ranks(nodes, "gradwire.benchmarks.ddp", lambda rank: arguments, Path(folder), star=None)
        return read(trace)


def _trace_in(folder: str) -> Path:
    """Make the folder of a run's traces, and return it."""
    trace = Path(folder) / "trace"
    trace.mkdir()
    return trace


def _computation(setup: Setup, trace: Path) -> list[str]:
    """Return the arguments of the program `ddp` that describe the computation. Without further ones it
    computes and exchanges nothing."""
    return [setup.model, str(setup.seconds), str(trace), str(setup.all_steps)]
