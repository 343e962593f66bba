"""`gc-bench step`: seconds per step of sync training on shaped links, beside PyTorch's own data parallelism.

Every worker, and the server, is a real process in a network namespace of its own, behind a link of --mbit in
each direction (`star`); this needs root. The model is its tensors (`layers`): gradients are noise, and
computation is emulated, because workers that share this machine's cores would slow each other down.

A run is COMPRESSOR[/DOWNLINK], such as `4bit` or `topk:ratio=100/topk:ratio=20`; the downlink is `auto` if
none is given. A peer is torch's DistributedDataParallel over gloo: `fp32`, `fp16` (its hook) or `powersgd`
(its hook, rank 4).

Printed per step, without the first few: median seconds, also in those of DDP fp32, and in the time that the
busiest link needs for the bytes that it carried; MB into and out of the node behind it, and how much of the
former came while the first worker computed; CPU of all processes; the most memory that server and workers
took.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..compressors import check_downlink, create
from ..deploy.plot import panels
from ..deploy.processes import Children
from ..exits import Exit
from ..settings import RunSettings
from . import output
from .arguments import BenchError, amount, at_least_one, file_to_write, plot_to_write, some_of
from .jobs import PATIENCE_S, run_job
from .layers import shapes
from .star import Star, check_network

WARM_UP = 3  # steps that are not counted: kernels are compiled, buckets arranged, memory is touched first
SAMPLE_S = 0.005
PEERS = ("fp32", "fp16", "powersgd")
DEFAULT_RUNS = ("none", "4bit", "topk:ratio=100")
SERVER = "server"


@dataclass(frozen=True, slots=True)
class Sample:
    """The state of a network at a time. carried: by node, bytes that have come to it and from it."""

    at: float
    carried: Mapping[str, tuple[int, int]]


@dataclass(frozen=True, kw_only=True)
class Row:
    """busiest: a node; bytes_in and bytes_out are its own, per step. link_seconds: what its link takes for
    the larger of both at least. computing_share: of the incoming bytes, how much came while the first worker
    computed."""

    name: str
    step_seconds: float
    steps: int
    busiest: str
    bytes_in: float
    bytes_out: float
    link_seconds: float
    computing_share: float
    cpu_seconds: float
    server_peak_bytes: int
    worker_peak_bytes: int


class Recorder:
    """Samples what the links of a star carry, and what the processes behind them take, until it is left."""

    def __init__(self, star: Star, nodes: Sequence[str]) -> None:
        self._star, self._nodes = star, nodes
        self.samples: list[Sample] = []
        self.peak_bytes: dict[str, int] = dict.fromkeys(nodes, 0)
        self.cpu: list[tuple[float, float]] = []  # (at, seconds of all processes)
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._repeat, args=(self._read_links, SAMPLE_S)),
            threading.Thread(target=self._repeat, args=(self._read_processes, 0.2)),
        ]

    def __enter__(self) -> Recorder:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _repeat(self, read: Any, every_s: float) -> None:
        while not self._over.wait(every_s):
            read()

    def _read_links(self) -> None:
        carried = {node: self._star.carried(node) for node in self._nodes}
        self.samples.append(Sample(time.monotonic(), carried))

    def _read_processes(self) -> None:
        total = 0.0
        for node in self._nodes:
            for pid in self._star.processes(node):
                taken = memory_and_cpu(pid)
                if taken is not None:
                    self.peak_bytes[node] = max(self.peak_bytes[node], taken[0])
                    total += taken[1]
        self.cpu.append((time.monotonic(), total))

    def carried_between(self, node: str, begin: float, end: float) -> tuple[int, int]:
        """Bytes to and from a node in this time."""
        times = [sample.at for sample in self.samples]
        came, left = zip(*(sample.carried[node] for sample in self.samples), strict=True)
        into, out = (np.diff(np.interp((begin, end), times, counts)) for counts in (came, left))
        return round(into.item()), round(out.item())


def memory_and_cpu(pid: int) -> tuple[int, float] | None:
    """The most resident bytes, and CPU seconds, of a process; None if there is none any more."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    peak = next((line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")), "0")
    ticks = int(stat[11]) + int(stat[12])
    return int(peak) * 1024, ticks / os.sysconf("SC_CLK_TCK")


def traced(folder: Path) -> list[list[tuple[float, float]]]:
    """By worker: when each step's computation began and ended."""
    found: list[list[tuple[float, float]]] = []
    for path in sorted(folder.iterdir()):
        pairs = [tuple(map(float, line.split())) for line in path.read_text().splitlines()]
        found.append([(began, ended) for began, ended in pairs])
    return found


def summarize(
    name: str,
    nodes: Sequence[str],
    traces: Sequence[Sequence[tuple[float, float]]],
    recorder: Recorder,
    mbit: float,
) -> Row:
    """mbit: of each link; infinite for none."""
    first = traces[0]
    if len(first) < WARM_UP + 2:
        raise BenchError(f"{name}: only {len(first)} steps were taken; give more --steps")
    begin, end = first[WARM_UP][0], first[-1][0]
    steps = len(first) - WARM_UP - 1
    carried = {node: recorder.carried_between(node, begin, end) for node in nodes}
    busiest = max(nodes, key=lambda node: max(carried[node]))
    came = [recorder.carried_between(busiest, *interval)[0] for interval in first[WARM_UP:-1]]
    spent = [seconds for at, seconds in recorder.cpu if begin <= at <= end]
    gaps = [after[0] - before[0] for trace in traces for before, after in itertools.pairwise(trace[WARM_UP:])]
    workers = [node for node in nodes if node != SERVER]
    return Row(
        name=name,
        step_seconds=statistics.median(gaps),
        steps=steps,
        busiest=busiest,
        bytes_in=carried[busiest][0] / steps,
        bytes_out=carried[busiest][1] / steps,
        link_seconds=max(carried[busiest]) / steps * 8 / (mbit * 1e6),
        computing_share=sum(came) / max(1, carried[busiest][0]),
        cpu_seconds=(spent[-1] - spent[0]) / steps if spent else 0.0,
        server_peak_bytes=recorder.peak_bytes.get(SERVER, 0),
        worker_peak_bytes=max(recorder.peak_bytes[node] for node in workers),
    )


def run_ours(given: argparse.Namespace, name: str) -> tuple[Row, Recorder, list[list[tuple[float, float]]]]:
    """One job of real daemons."""
    compressor, _, downlink = name.partition("/")
    nodes = [SERVER, *(f"worker-{rank}" for rank in range(given.workers))]
    with Star(nodes, given.mbit) as star, tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace"
        trace.mkdir()
        task = f"gradwire.benchmarks.layers:task:model={given.model},seconds={given.seconds},trace={trace}"
        settings = RunSettings(
            task=f"{task},samples={given.workers * (WARM_UP + given.steps + 1)}",
            workers=given.workers,
            compressor=compressor,
            downlink=downlink or "auto",
            overlap=given.overlap,
            part_bytes=given.part_bytes,
            epochs=1,
            batch_size=1,
            learning_rate=1e-3,
        )
        with Recorder(star, nodes) as recorder:
            run_job(settings, Path(folder), star=star)
        traces = traced(trace)
    return summarize(name, nodes, traces, recorder, given.mbit or float("inf")), recorder, traces


def run_peer(given: argparse.Namespace, hook: str) -> tuple[Row, Recorder, list[list[tuple[float, float]]]]:
    """The same with DistributedDataParallel."""
    nodes = [f"worker-{rank}" for rank in range(given.workers)]
    with Star(nodes, given.mbit) as star, tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace"
        trace.mkdir()
        with Recorder(star, nodes) as recorder, Children(Path(folder)) as children:
            started = [
                children.start(
                    node,
                    "gradwire.benchmarks.ddp",
                    [
                        *(given.model, str(given.seconds), str(trace), str(WARM_UP + given.steps + 1)),
                        *(str(rank), str(given.workers), f"{star.address(nodes[0])}:29500", hook),
                    ],
                    (*star.prefix(node), "env", "GLOO_SOCKET_IFNAME=eth0"),
                )
                for rank, node in enumerate(nodes)
            ]
            deadline = time.monotonic() + PATIENCE_S
            while any(child.code is None for child in started):
                ended = [child for child in started if child.code not in (None, 0)]
                if ended or time.monotonic() > deadline:
                    why = (ended or started)[0]
                    raise BenchError(f"DDP {hook} did not end: {why.name}: {why.ending}: {why.last_lines()}")
                time.sleep(0.1)
        traces = traced(trace)
    return summarize(f"DDP {hook}", nodes, traces, recorder, given.mbit or float("inf")), recorder, traces


def cells(row: Row, fp32: float | None) -> list[object]:
    return [
        f"`{row.name}`",
        f"{row.step_seconds:.4f}",
        f"{row.step_seconds / fp32:.2f}" if fp32 else "–",
        f"{row.step_seconds / row.link_seconds:.2f}" if row.link_seconds else "–",
        f"{row.bytes_in / 1e6:.3f}",
        f"{row.bytes_out / 1e6:.3f}",
        f"{row.computing_share:.2f}",
        f"{row.cpu_seconds:.3f}",
        f"{row.server_peak_bytes / 1e6:.0f}" if row.server_peak_bytes else "–",
        f"{row.worker_peak_bytes / 1e6:.0f}",
    ]


HEADINGS = (
    *("", "s per step", "of DDP fp32", "of its link's time", "MB in", "MB out", "in while computing"),
    *("CPU s", "server MB", "worker MB"),
)


def draw(path: Path, title: str, row: Row, recorder: Recorder, trace: Sequence[tuple[float, float]]) -> None:
    """A step as a picture: what the busiest link carried over time, and when the first worker computed."""
    (began, ended), (after, _) = trace[-2], trace[-1]
    inside = [sample for sample in recorder.samples if began <= sample.at <= after]
    figure, (axes,) = panels([f"{title}: one step of {row.name}"])
    for direction, label in enumerate((f"into {row.busiest}", f"out of {row.busiest}")):
        points = [(each.at - began, each.carried[row.busiest][direction]) for each in inside]
        rates = [
            (at, (to - before) * 8e-6 / (at - earlier))
            for (earlier, before), (at, to) in itertools.pairwise(points)
            if at > earlier
        ]
        axes.plot([at for at, _ in rates], [rate for _, rate in rates], label=label)
    axes.axvspan(0, ended - began, alpha=0.15, label="a worker computes")
    axes.set(xlabel="seconds", ylabel="Mbit/s", xlim=(0, after - began))
    axes.legend(frameon=False)
    figure.savefig(path)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shown = "(default: %(default)s)"
    text = "layer table: vgg16, vgg19, resnet20, resnet50, resnet56, resnet110 or NxSIZE"
    parser.add_argument("--model", default="4x1048576", metavar="NAME", help=f"{text} {shown}")
    parser.add_argument("--workers", type=at_least_one, default=4, help=shown)
    text = "what travels while workers compute"
    parser.add_argument(
        "--overlap", choices=("off", "backward", "both"), default="backward", help=f"{text} {shown}"
    )
    parser.add_argument("--part-bytes", type=int, default=0, help=f"as of gc-run {shown}")
    text = "of each link in each direction; 0 for as fast as it goes"
    parser.add_argument("--mbit", type=amount, default=100.0, help=f"{text} {shown}")
    parser.add_argument("--seconds", type=amount, default=0.0, help=f"of computation per step {shown}")
    parser.add_argument("--steps", type=at_least_one, default=12, help=f"that are counted {shown}")
    parser.add_argument("--runs", nargs="*", default=DEFAULT_RUNS, metavar="SPEC[/SPEC]", help=shown)
    peers = some_of(PEERS)
    parser.add_argument("--peers", type=peers, default=",".join(PEERS), metavar="NAME,...", help=shown)
    parser.add_argument("--no-peers", dest="peers", action="store_const", const=[], help="none of them")
    parser.add_argument("--json", type=file_to_write, metavar="FILE", help="every row")
    parser.add_argument("--plot", type=plot_to_write, metavar="FILE", help="a step of the last run over time")


def run(given: argparse.Namespace) -> int:
    check_network()
    shapes(given.model)
    for name in given.runs:
        compressor, _, downlink = name.partition("/")
        create(compressor)
        check_downlink(downlink or "auto")
    rows: list[Row] = []
    fp32: float | None = None
    print(output.table(HEADINGS, []), flush=True)
    todo = [(run_peer, peer) for peer in given.peers] + [(run_ours, name) for name in given.runs]
    for measure, name in todo:
        row, recorder, traces = measure(given, name)
        rows.append(row)
        if name == "fp32":
            fp32 = row.step_seconds
        print(output.row(cells(row, fp32)), flush=True)
        if given.plot is not None and name == todo[-1][1]:
            draw(given.plot, given.model, row, recorder, traces[0])
    output.write_json(given.json, [asdict(row) for row in rows])
    return Exit.DONE
