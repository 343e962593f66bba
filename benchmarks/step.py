"""`gc-bench step`: seconds per step of sync training on shaped links, beside PyTorch's own data parallelism.

Every worker, and the server, is a real process in a network namespace of its own, behind a link of --mbit in
each direction (`star`); this needs root. The model is its tensors (`layers`): gradients are noise, and
computation is emulated, because workers that share this machine's cores would slow each other down.

A run is COMPRESSOR[/DOWNLINK], such as `4bit` or `topk:ratio=100/topk:ratio=20`; the downlink is `auto` if
none is given. A peer is torch's DistributedDataParallel over gloo: `fp32`, `fp16` (its hook) or `powersgd`
(its hook, rank 4). --hooks adds peers with our compressors as hooks (`gradwire.ddp`), which need no server.

Printed per step, without the first few, and beside them the seconds of the first once all workers begin:

- median seconds, also relative to those of DDP fp32, and to the time that the busiest link needs for its
  bytes;
- MB into and out of the node behind that link, and the fraction that arrived while the first worker computed;
- CPU seconds of all processes, and peak memory of server and workers.
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import asdict, dataclass, replace
from typing import get_args

from ..common.exits import Exit
from ..compressors import create, parse_downlink
from ..planning import parse_fusion, parse_order
from ..planning.step import Overlap
from ..settings import names_in
from ..worker.tasks.task import TaskSpecError
from . import output
from .arguments import MBIT, BenchError, amount, at_least_one, json_option, option, some_of
from .ddp import HOOKS, OURS, hook_state
from .layers import task
from .shaped import SERVER, Recorded, Setup, exchange_seconds, run_ours, run_peer
from .star import check_network

PEERS = ("fp32", "fp16", "powersgd")
DEFAULT_RUNS = ("none", "4bit", "topk:ratio=100")
OVERLAPS = get_args(Overlap)
AUTO = "auto"
FP32 = "DDP fp32"


@dataclass(frozen=True, kw_only=True)
class StepRow:
    """A row of the table: one run. Bytes and times are per step.

    Attributes:
        name: compressor and downlink of the run, or the peer.
        overlap: value of --overlap; None for a peer.
        step_seconds: median seconds of a step.
        first_seconds: seconds of the first step, once all workers have the parameters.
        busiest: node whose link carries most bytes.
        bytes_in, bytes_out: bytes that this node receives and sends.
        link_seconds: least time of its link for the larger of these; 0 without a limit.
        computing_share: fraction of the incoming bytes that arrives while the first worker computes.
        cpu_seconds: CPU seconds of all processes.
        server_peak_bytes: peak resident memory of the server; 0 for a peer.
        worker_peak_bytes: largest peak resident memory of a worker.
    """

    name: str
    overlap: Overlap | None
    step_seconds: float
    first_seconds: float
    steps: int
    busiest: str
    bytes_in: float
    bytes_out: float
    link_seconds: float
    computing_share: float
    cpu_seconds: float
    server_peak_bytes: int
    worker_peak_bytes: int


def summarize(name: str, overlap: Overlap | None, recorded: Recorded, mbit: float) -> StepRow:
    """Return the row of a recorded run; a peer's has no overlap."""
    first, nodes, recorder = recorded.counted[0], recorded.nodes, recorded.recorder
    begin, end, steps = first[0].began, first[-1].began, len(first) - 1
    carried = {node: recorder.carried_between(node, begin, end) for node in nodes}
    busiest = max(nodes, key=lambda node: max(carried[node]))
    received = [recorder.carried_between(busiest, step.began, step.ended)[0] for step in first[:-1]]
    peaks = {node: recorder.peak_bytes(node, end) for node in nodes}
    return StepRow(
        name=name,
        overlap=overlap,
        step_seconds=recorded.step_seconds,
        first_seconds=recorded.first_seconds,
        steps=steps,
        busiest=busiest,
        bytes_in=carried[busiest][0] / steps,
        bytes_out=carried[busiest][1] / steps,
        link_seconds=max(carried[busiest]) / steps * 8 / (mbit * 1e6) if mbit else 0.0,
        computing_share=sum(received) / max(1, carried[busiest][0]),
        cpu_seconds=recorder.cpu_between(begin, end) / steps,
        server_peak_bytes=peaks.pop(SERVER, 0),
        worker_peak_bytes=max(peaks.values()),
    )


def cells(row: StepRow, fp32: float | None) -> list[object]:
    """Return the cells of a row, in the order of `HEADINGS`, with the seconds of a step of DDP fp32."""
    return [
        f"`{row.name}`",
        row.overlap or "–",
        f"{row.step_seconds:.4f}",
        f"{row.first_seconds:.3f}",
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
    *("", "overlap", "s per step", "s of the first", "of DDP fp32", "of its link's time", "MB in", "MB out"),
    *("in while computing", "CPU s", "server MB", "worker MB"),
)


def seconds_or_auto(text: str) -> float | str:
    """Parse a number of seconds, or the word `auto`, which is returned as it is."""
    return AUTO if text == AUTO else amount(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "layer table, one of gc-plan's or NxSIZE"
    option(parser, "--model", str, "4x1048576", "NAME", text)
    option(parser, "--workers", at_least_one, 4, "N", "number of workers")
    text = "values of gc-server's --overlap, one run for each"
    option(parser, "--overlap", some_of(OVERLAPS), "backward", "NAME,...", text)
    text = "bytes of a part as float32 (default: that of gc-server)"
    parser.add_argument("--part-bytes", type=at_least_one, default=0, metavar="N", help=text)
    text = "values of gc-server's --{}, one run for each"
    option(parser, "--fusion", names_in, "bytes", "NAME,...", text.format("fusion"))
    option(parser, "--order", names_in, "fifo", "NAME,...", text.format("order"))
    option(parser, "--mbit", amount, 100.0, "N", MBIT)
    text = "seconds of emulated computation per step; auto: as many as the exchange of the run takes"
    option(parser, "--seconds", seconds_or_auto, 0.0, "N", text)
    option(parser, "--steps", at_least_one, 12, "N", "number of measured steps")
    runs = f"compressors, each with one for the updates or auto (default: {' '.join(DEFAULT_RUNS)})"
    parser.add_argument("--runs", nargs="*", default=DEFAULT_RUNS, metavar="SPEC[/SPEC]", help=runs)
    text = "hooks of PyTorch's DDP, one run for each"
    option(parser, "--peers", some_of(PEERS), ",".join(PEERS), "NAME,...", text)
    text = "leave out the runs of --peers"
    parser.add_argument("--no-peers", dest="peers", action="store_const", const=[], help=text)
    text = "compressors to run in DDP, as hooks of gradwire.ddp (default: none)"
    parser.add_argument("--hooks", nargs="*", default=(), metavar=HOOKS, help=text)
    json_option(parser)


def check(given: argparse.Namespace) -> None:
    """Raise for options that conflict or cannot be parsed, before anything is measured.

    Raises:
        BenchError: if options conflict, or the model is unknown.
        SpecError: if a spec is wrong.
    """
    try:
        task(given.model)
    except TaskSpecError as error:
        raise BenchError(f"--{error}") from None
    for name in given.runs:
        compressor, downlink = specs(name)
        create(compressor)
        parse_downlink(downlink)
    for hook in given.hooks:
        hook_state(hook)
    for fusion, order in itertools.product(given.fusion, given.order):
        parse_fusion(fusion)
        parse_order(order)
    if given.seconds == AUTO and len(given.runs) != 1:
        number = len(given.runs)
        raise BenchError(f"--seconds auto: expected one --runs, whose exchange is measured, got {number}")


def run(given: argparse.Namespace) -> int:
    """Run all peers and jobs, and print the table; return the exit code."""
    check(given)
    check_network()
    automatic = given.seconds == AUTO
    setup = Setup(
        model=given.model,
        workers=given.workers,
        mbit=given.mbit,
        seconds=0.0 if automatic else given.seconds,
        steps=given.steps,
        part_bytes=given.part_bytes,
    )
    if automatic:
        (name,) = given.runs
        setup = replace(setup, seconds=exchange_seconds(setup, *specs(name)))
    rows: list[StepRow] = []
    print(output.table(HEADINGS, []), flush=True)

    def add(row: StepRow) -> None:
        rows.append(row)
        fp32 = next((each.step_seconds for each in rows if each.name == FP32), None)
        print(output.row(cells(row, fp32)), flush=True)

    for hook in [*given.peers, *(f"{OURS}{compressor}" for compressor in given.hooks)]:
        add(summarize(f"DDP {hook}", None, run_peer(setup, hook), given.mbit))
    for name in given.runs:
        for overlap, fusion, order in itertools.product(given.overlap, given.fusion, given.order):
            planned = replace(setup, fusion=fusion, order=order)
            title = " ".join([name, *(each for each in (fusion, order) if each not in ("bytes", "fifo"))])
            add(summarize(title, overlap, run_ours(planned, *specs(name), overlap), given.mbit))
    output.write_json(given.json, [asdict(row) for row in rows])
    return Exit.DONE


def specs(name: str) -> tuple[str, str]:
    """Return the specs of the compressor and of the downlink in the name of a run."""
    compressor, _, downlink = name.partition("/")
    return compressor, downlink or "auto"
