"""`gc-bench memory`: bytes per parameter of server and workers, measured and accounted for.

Each job is run twice, with --elements parameters and with twice as many. The difference of a process's peak
resident memory, up to its last step, is the cost of these parameters, without that of interpreter and
libraries. The jobs are those of `step`: sync, plain SGD, `--downlink auto`, real daemons behind links of
--mbit, which needs root. A part is a 32nd of the model. Among the workers the median counts: a worker that
lags behind has more updates waiting for it.

The account lists the bytes that are allocated for each parameter on purpose: parameters, gradients, sums,
residuals, and payloads, by the bytes that the server's link carried. Bytes beyond it are payloads that are
being made or sent, buffers of gRPC, or kept by the allocator.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from ..common.exits import Exit
from ..common.parts import SHARE
from ..compressors import AUTO, create, parse_compressor
from . import output
from .arguments import MBIT, BenchError, amount, at_least_one, json_option, option, some_of
from .bound import Overlap
from .shaped import SERVER, Recorded, Setup, run_ours
from .star import check_network
from .step import DEFAULT_RUNS, OVERLAPS

TENSOR = 1 << 20  # elements of each tensor: a larger model has more tensors, not larger ones
LEAST = 16  # number of tensors; with fewer, parts are smaller than those of most jobs


@dataclass(frozen=True)
class Peaks:
    """The measurements of one job.

    Attributes:
        server: peak resident memory of the server, in bytes.
        worker: peak resident memory of a worker, in bytes, median over workers.
        bytes_in, bytes_out: bytes that the server's link receives and sends per step.
    """

    server: float
    worker: float
    bytes_in: float
    bytes_out: float


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """A row of the table: bytes per parameter of one compressor with one overlap.

    Attributes:
        name: spec of the compressor.
        overlap: value of --overlap.
        server, worker: measured bytes per parameter.
        server_account, worker_account: bytes per parameter that are accounted for, by purpose.
        small, large: measurements of the two jobs compared.
    """

    name: str
    overlap: Overlap
    server: float
    worker: float
    server_account: Mapping[str, float]
    worker_account: Mapping[str, float]
    small: Peaks
    large: Peaks


def accounts(
    compressor: str, workers: int, up: float, down: float
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the bytes per parameter that are accounted for, by purpose, at the server and at a worker.

    With `--downlink auto` the downlink is lossy if the pushes are; the server then also keeps a replica equal
    to that of the workers. A job with --output also keeps the last version.

    Args:
        compressor: spec of the compressor.
        workers: number of workers.
        up, down: bytes per parameter of a worker's push, and of an update.
    """
    lossy = not parse_compressor(compressor).lossless
    server = {"parameters": 4.0, "sum": 4.0, "last version": 4.0}
    worker = {"parameters": 4.0, "gradients": 4.0}
    if lossy:
        server["replica"] = 4.0
        worker |= {"residual": 4.0, "draft": 4.0}
    return server | {"pushes": workers * up, "update": down}, worker | {"push": up, "update": down}


def peaks_of(recorded: Recorded) -> Peaks:
    """Return the peak memory and the bytes per step of a recorded job."""
    begin, end = recorded.counted[0][0].began, recorded.counted[0][-1].began
    steps = len(recorded.counted[0]) - 1
    server, *workers = (recorded.recorder.peak_bytes(node, end) for node in recorded.nodes)
    came, left = recorded.recorder.carried_between(SERVER, begin, end)
    return Peaks(server, statistics.median(workers), came / steps, left / steps)


def footprint(
    name: str, overlap: Overlap, small: Peaks, large: Peaks, elements: int, workers: int
) -> Footprint:
    """Compare a job with `elements` parameters and one with twice as many; return the row of the table.

    Args:
        name: spec of the compressor.
        overlap: value of --overlap.
        small, large: measurements of the two jobs.
        elements: number of parameters of the smaller model.
        workers: number of workers.
    """
    up, down = large.bytes_in - small.bytes_in, large.bytes_out - small.bytes_out
    server, worker = accounts(name, workers, up / elements / workers, down / elements / workers)
    return Footprint(
        name=name,
        overlap=overlap,
        server=(large.server - small.server) / elements,
        worker=(large.worker - small.worker) / elements,
        server_account=server,
        worker_account=worker,
        small=small,
        large=large,
    )


def cells(each: Footprint) -> list[object]:
    """Return the cells of a row of the table, in the order of `HEADINGS`."""
    return [
        f"`{each.name}`",
        each.overlap,
        f"{each.server:.1f}",
        account_text(each.server_account),
        f"{each.worker:.1f}",
        account_text(each.worker_account),
    ]


def account_text(account: Mapping[str, float]) -> str:
    """Return an account as text: the sum, then each purpose with its bytes per parameter."""
    return f"{sum(account.values()):.1f}: " + ", ".join(f"{what} {n:.3g}" for what, n in account.items())


HEADINGS = "", "overlap", "server, B per parameter", "account", "worker, B per parameter", "account"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = f"parameters of the smaller model, in tensors of {TENSOR:,}"
    option(parser, "--elements", at_least_one, LEAST * TENSOR, "N", text)
    option(parser, "--workers", at_least_one, 4, "N", "number of workers")
    option(parser, "--mbit", amount, 1000.0, "N", MBIT)
    option(parser, "--steps", at_least_one, 8, "N", "number of steps after the first few")
    text = f"compressors, one row for each (default: {' '.join(DEFAULT_RUNS)})"
    parser.add_argument("--runs", nargs="*", default=DEFAULT_RUNS, metavar="SPEC", help=text)
    text = "values of gc-server's --overlap, one row for each"
    option(parser, "--overlap", some_of(OVERLAPS), ",".join(OVERLAPS), "NAME,...", text)
    json_option(parser)


def run(given: argparse.Namespace) -> int:
    """Measure every compressor with every overlap, and print the table; return the exit code."""
    tensors, rest = divmod(given.elements, TENSOR)
    if rest or tensors < LEAST:
        least = f"a multiple of {TENSOR:,} from {LEAST * TENSOR:,}"
        raise BenchError(f"--elements: expected {least}, got {given.elements:,}")
    for name in given.runs:
        create(name)
    check_network()
    rows: list[Footprint] = []
    print(output.table(HEADINGS, []), flush=True)
    for name, overlap in itertools.product(given.runs, given.overlap):
        small, large = (
            peaks_of(run_ours(setup, name, AUTO, overlap))
            for setup in (
                Setup(
                    model=f"{count}x{TENSOR}",
                    workers=given.workers,
                    mbit=given.mbit,
                    steps=given.steps,
                    part_bytes=4 * count * TENSOR // SHARE,
                )
                for count in (tensors, 2 * tensors)
            )
        )
        rows.append(footprint(name, overlap, small, large, given.elements, given.workers))
        print(output.row(cells(rows[-1])), flush=True)
    output.write_json(given.json, [asdict(each) for each in rows])
    return Exit.DONE
