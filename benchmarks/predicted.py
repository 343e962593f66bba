"""`gc-bench predicted`: seconds per step as the cost model predicts them, beside measured ones.

Each combination of --models, --mbit, --runs, --overlap, --fusion and --order is one job of real daemons, on
links and with computation as in `gc-bench step`; this needs root. It is predicted twice. The first prediction
is that of gc-plan: from the model, the link, the computation of workers without an exchange, and this
machine's cores. The second is that of the job's own server, from its measurements. If --seconds is not given,
the emulated computation is the one that gc-plan assumes for the model.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import statistics
from dataclasses import asdict, dataclass, replace

from ..common.exits import Exit
from ..compressors import parse_compressor
from ..deploy.plan import FORWARD, computation_of
from ..planning import parse_fusion, parse_order
from ..planning.job import FASTEST, JobProfile, StepOptions
from ..planning.models import tensors
from ..planning.predictions import predict
from ..settings import names_in
from . import output
from .arguments import (
    MBIT,
    BenchError,
    amount,
    amounts,
    at_least_one,
    json_option,
    layer_tables,
    option,
    some_of,
)
from .shaped import WARM_UP, Setup, compute_alone, run_ours
from .star import check_network
from .step import OVERLAPS

RTT_S = 0.3e-3  # between two namespaces of one machine
BATCH = 32  # samples of a step, whose computation is emulated

ENOUGH_S = 30.0  # limit of a run's duration; with longer steps it has fewer of them
PLANNED = 6  # steps after which the plan by measurement is in force


@dataclass(frozen=True, kw_only=True)
class PredictedRow:
    """A row of the table: a job with its measured and predicted times of a step, in seconds.

    Attributes:
        mbit: Mbit/s of each link in each direction; 0 for no limit.
        computing_s: computation, measured without an exchange.
        predicted_s: gc-plan's prediction.
        live_s: the server's own prediction; 0 if it made none.
        load: this machine's load average before the job.
    """

    model: str
    mbit: float
    workers: int
    choice: StepOptions
    computing_s: float
    measured_s: float
    predicted_s: float
    live_s: float
    load: float


def profile(setup: Setup, computing_s: float) -> JobProfile:
    """Return a job as the planner describes it, with the same overhead of Python for each tensor.

    Args:
        setup: the job.
        computing_s: whole computation per step; its rest beyond the emulated seconds is the overhead.
    """
    found = tensors(setup.model)
    work = sum(tensor.multiplications for tensor in found)
    over_s = max(0.0, computing_s - setup.seconds) / len(found)
    each = [over_s + setup.seconds * tensor.multiplications / work for tensor in found]
    rate = setup.mbit * 1e6 / 8 if setup.mbit else FASTEST
    return JobProfile(
        shapes=[tensor.shape for tensor in found],
        forward_s=[FORWARD * seconds for seconds in each],
        backward_s=[(1 - FORWARD) * seconds for seconds in each],
        square_norms=[tensor.square_norm for tensor in found],
        worker_bandwidth=rate,
        server_bandwidth=rate,
        workers=setup.workers,
        rtt_s=RTT_S,
        cores=os.cpu_count(),
        on_cores=over_s * len(found) / computing_s if computing_s else 0.0,
    )


HEADINGS = (
    *("model", "Mbit/s", "compressor", "overlap", "fusion", "order", "s computing", "s per step"),
    *("predicted", "of measured", "by the server", "of measured", "load"),
)


def cells(row: PredictedRow) -> list[object]:
    """Return the cells of a row of the table, in the order of `HEADINGS`."""
    choice, live = row.choice, ("–", "–")
    if row.live_s:
        live = f"{row.live_s:.3f}", f"{row.live_s / row.measured_s:.2f}"
    return [
        *(row.model, f"{row.mbit:g}", f"`{choice.compressor}`", choice.overlap, choice.fusion, choice.order),
        *(f"{row.computing_s:.3f}", f"{row.measured_s:.3f}"),
        *(f"{row.predicted_s:.3f}", f"{row.predicted_s / row.measured_s:.2f}"),
        *(*live, f"{row.load:.1f}"),
    ]


def ended_early(setup: Setup, expected_s: float, choice: StepOptions) -> Setup:
    """Return the setup with fewer steps if it would take longer than `ENOUGH_S`, else unchanged.

    Enough steps remain for a plan by measurement, if the options ask for one.
    """
    if expected_s * setup.all_steps <= ENOUGH_S:
        return setup
    plans = parse_fusion(choice.fusion).measured or parse_order(choice.order).measured
    warm_up = PLANNED if plans else 2
    steps = max(1, math.floor(ENOUGH_S / expected_s) - warm_up)
    return replace(setup, warm_up=min(warm_up, setup.warm_up), steps=min(steps, setup.steps))


def measure(setup: Setup, choice: StepOptions, computing_s: float) -> PredictedRow:
    """Run one job and return its row.

    Args:
        setup: model, links and emulated computation.
        choice: options of the job.
        computing_s: seconds of a step's computation, measured without an exchange.
    """
    load = os.getloadavg()[0]
    predicted_s = predict(profile(setup, computing_s), choice).step_s
    planned = replace(ended_early(setup, predicted_s, choice), fusion=choice.fusion, order=choice.order)
    found = run_ours(planned, choice.compressor.name, "auto", choice.overlap)
    return PredictedRow(
        model=setup.model,
        mbit=setup.mbit,
        workers=setup.workers,
        choice=choice,
        computing_s=computing_s,
        measured_s=found.step_seconds,
        predicted_s=predicted_s,
        live_s=found.predicted_seconds,
        load=load,
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option(
        parser,
        "--models",
        layer_tables,
        "resnet50,resnet110",
        "NAME,...",
        "layer tables, as for gc-bench step",
    )
    option(parser, "--workers", at_least_one, 4, "N", "number of workers")
    option(parser, "--mbit", amounts, "20,100,1000", "N,...", MBIT)
    text = "seconds of emulated computation per step (default: those that gc-plan assumes)"
    parser.add_argument("--seconds", type=amount, metavar="N", help=text)
    runs = ("4bit", "topk:ratio=100")
    text = f"compressors, one run for each (default: {' '.join(runs)})"
    parser.add_argument("--runs", nargs="*", default=runs, metavar="SPEC", help=text)
    text = "values of gc-server's --{}, one run for each"
    option(parser, "--overlap", some_of(OVERLAPS), "backward", "NAME,...", text.format("overlap"))
    option(parser, "--fusion", names_in, "none,mgwfbp,seamgs", "NAME,...", text.format("fusion"))
    option(parser, "--order", names_in, "fifo", "NAME,...", text.format("order"))
    option(parser, "--steps", at_least_one, 12, "N", "largest number of measured steps")
    json_option(parser)


def choices(given: argparse.Namespace) -> list[StepOptions]:
    """Return the options of each job to run, all combinations of the command's.

    Raises:
        BenchError: if there is none.
    """
    found = list[StepOptions]()
    compressors = [parse_compressor(spec).compression() for spec in given.runs]
    for overlap, fusion, order in itertools.product(given.overlap, given.fusion, given.order):
        parse_fusion(fusion)
        parse_order(order)
        found += [
            StepOptions(compressor=sent, overlap=overlap, fusion=fusion, order=order) for sent in compressors
        ]
    if not found:
        raise BenchError("--runs: expected at least one compressor")
    return found


def run(given: argparse.Namespace) -> int:
    """Run and predict every job, and print the table; return the exit code."""
    chosen = choices(given)
    check_network()
    print(output.table(HEADINGS, []), flush=True)
    rows = list[PredictedRow]()
    for model in given.models:
        emulated_s = given.seconds if given.seconds is not None else computation_of(model, BATCH)
        setup = Setup(model=model, workers=given.workers, mbit=0.0, seconds=emulated_s, steps=given.steps)
        computed = [step.seconds for trace in compute_alone(setup) for step in trace[WARM_UP:]]
        computing_s = statistics.median(computed)
        for mbit, choice in itertools.product(given.mbit, chosen):
            rows.append(measure(replace(setup, mbit=mbit), choice, computing_s))
            print(output.row(cells(rows[-1])), flush=True)
    output.write_json(given.json, [asdict(row) for row in rows])
    return Exit.DONE
