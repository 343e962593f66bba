"""`gc-bench predicted`: seconds per step as the cost model predicts them, beside what they are.

Each combination of --models, --mbit, --runs, --overlap, --fusion and --order is one job of real daemons, on
links and with computation as in `gc-bench step`; this needs root. It is predicted twice: from the model, the
link, the computation that workers have without an exchange and this machine's cores, as by gc-plan; and by
the job's own server, from what it has measured. The computation emulated is what gc-plan takes a model to
have, if --seconds does not say it.

With --fit the processors' costs (`planning.job.Costs`) are fitted to these steps, and printed: the costs with
which the predictions differ least from what was measured. Take many kinds of models and runs for that.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from ..common.exits import Exit
from ..compressors import parse_compressor
from ..deploy.plan import FORWARD, computation_of
from ..planning import parse_fusion, parse_order
from ..planning.job import FASTEST, Costs, JobProfile, StepOptions
from ..planning.models import tensors
from ..planning.predictions import predict
from ..settings import names_in
from . import output
from .arguments import MBIT, BenchError, amount, at_least_one, json_option, option, some_of
from .papers import names
from .shaped import WARM_UP, Setup, compute_alone, run_ours
from .star import check_network
from .step import OVERLAPS

RTT_S = 0.3e-3  # between two namespaces of one machine
BATCH = 32  # samples of a step, whose computation is emulated
# A run with long steps takes fewer of them. Plans are made after five.
ENOUGH_S = 30.0
PLANNED = 6


@dataclass(frozen=True, kw_only=True)
class PredictedRow:
    """A job, with seconds of a step.

    Attributes:
        computing_s: of computation alone, of which `emulated_s` are emulated.
        live_s: the server's own prediction; 0 if it made none.
        load: this machine's load average before the job.
    """

    model: str
    mbit: float
    workers: int
    choice: StepOptions
    computing_s: float
    emulated_s: float
    measured_s: float
    live_s: float
    load: float

    def predicted_s(self, costs: Costs | None = None) -> float:
        return predict(self.profile(costs or Costs()), self.choice).step_s

    def profile(self, costs: Costs) -> JobProfile:
        return profile(self.model, self.mbit, self.workers, self.emulated_s, self.computing_s, costs)


def profile(
    model: str, mbit: float, workers: int, emulated_s: float, computing_s: float, costs: Costs
) -> JobProfile:
    """Return the job for the planner; Python takes the rest of `computing_s`, the same for each tensor."""
    found = tensors(model)
    work = sum(tensor.multiplications for tensor in found)
    over_s = max(0.0, computing_s - emulated_s) / len(found)
    each = [over_s + emulated_s * tensor.multiplications / work for tensor in found]
    rate = mbit * 1e6 / 8 if mbit else FASTEST
    return JobProfile(
        shapes=[tensor.shape for tensor in found],
        forward_s=[FORWARD * seconds for seconds in each],
        backward_s=[(1 - FORWARD) * seconds for seconds in each],
        square_norms=[tensor.square_norm for tensor in found],
        worker_bandwidth=rate,
        server_bandwidth=rate,
        workers=workers,
        rtt_s=RTT_S,
        cores=os.cpu_count(),
        on_cores=over_s * len(found) / computing_s if computing_s else 0.0,
        costs=costs,
    )


HEADINGS = (
    *("model", "Mbit/s", "compressor", "overlap", "fusion", "order", "s computing", "s per step"),
    *("predicted", "of measured", "by the server", "of measured", "load"),
)


def cells(row: PredictedRow) -> list[object]:
    choice, predicted_s = row.choice, row.predicted_s()
    return [
        *(row.model, f"{row.mbit:g}", f"`{choice.compressor}`", choice.overlap, choice.fusion, choice.order),
        *(f"{row.computing_s:.3f}", f"{row.measured_s:.3f}"),
        *(f"{predicted_s:.3f}", f"{predicted_s / row.measured_s:.2f}"),
        *((f"{row.live_s:.3f}", f"{row.live_s / row.measured_s:.2f}") if row.live_s else ("–", "–")),
        f"{row.load:.1f}",
    ]


def ended_early(setup: Setup, expected_s: float, choice: StepOptions) -> Setup:
    """Return the setup with at most `ENOUGH_S` of steps, but never fewer than its plan takes."""
    if expected_s * setup.all_steps <= ENOUGH_S:
        return setup
    plans = parse_fusion(choice.fusion).measured or parse_order(choice.order).measured
    warm_up = PLANNED if plans else 2
    steps = max(1, math.floor(ENOUGH_S / expected_s) - warm_up)
    return replace(setup, warm_up=min(warm_up, setup.warm_up), steps=min(steps, setup.steps))


def measure(setup: Setup, choice: StepOptions, computing_s: float) -> PredictedRow:
    load = os.getloadavg()[0]
    guess = predict(
        profile(setup.model, setup.mbit, setup.workers, setup.seconds, computing_s, Costs()), choice
    ).step_s
    setup = ended_early(setup, guess, choice)
    found = run_ours(
        replace(setup, fusion=choice.fusion, order=choice.order),
        choice.compressor.name,
        "auto",
        choice.overlap,
    )
    return PredictedRow(
        model=setup.model,
        mbit=setup.mbit,
        workers=setup.workers,
        choice=choice,
        computing_s=computing_s,
        emulated_s=setup.seconds,
        measured_s=found.step_seconds,
        live_s=found.predicted_seconds,
        load=load,
    )


def distance(rows: Sequence[PredictedRow], costs: Costs) -> float:
    """Return the mean square of log(predicted / measured)."""
    return statistics.fmean(math.log(row.predicted_s(costs) / row.measured_s) ** 2 for row in rows)


def fit(rows: Sequence[PredictedRow], costs: Costs) -> Costs:
    """Change one cost after the other, by ever smaller factors, while the distance decreases."""
    best = distance(rows, costs)
    for factor in (2.0, 1.4, 1.2, 1.1, 1.05):
        moved = True
        while moved:
            moved = False
            for field, change in itertools.product(fields(Costs), (factor, 1 / factor)):
                other = replace(costs, **{field.name: getattr(costs, field.name) * change})
                if (found := distance(rows, other)) < best * 0.999:
                    best, costs, moved = found, other, True
    return costs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option(parser, "--models", names, "resnet50,resnet110", "NAME,...", "layer tables, as of gc-bench step")
    option(parser, "--workers", at_least_one, 4, "N", "workers")
    option(parser, "--mbit", amounts, "20,100,1000", "N,...", MBIT)
    text = "seconds of emulated computation per step (default: those of gc-plan)"
    parser.add_argument("--seconds", type=amount, metavar="N", help=text)
    runs = ("4bit", "topk:ratio=100")
    text = f"compressors (default: {' '.join(runs)})"
    parser.add_argument("--runs", nargs="*", default=runs, metavar="SPEC", help=text)
    option(parser, "--overlap", some_of(OVERLAPS), "backward", "NAME,...", "--overlap of gc-server")
    option(parser, "--fusion", names_in, "none,mgwfbp,seamgs", "NAME,...", "--fusion of gc-server")
    option(parser, "--order", names_in, "fifo", "NAME,...", "--order of gc-server")
    option(parser, "--steps", at_least_one, 12, "N", "most steps to count")
    parser.add_argument("--fit", action="store_true", help="fit of the costs to these steps")
    json_option(parser)


def amounts(text: str) -> list[float]:
    return [amount(part) for part in text.split(",")]


def choices(given: argparse.Namespace) -> list[StepOptions]:
    found = list[StepOptions]()
    compressors = [parse_compressor(spec).compression() for spec in given.runs]
    for overlap, fusion, order in itertools.product(given.overlap, given.fusion, given.order):
        parse_fusion(fusion)
        parse_order(order)
        found += [
            StepOptions(compressor=sent, overlap=overlap, fusion=fusion, order=order) for sent in compressors
        ]
    if not found:
        raise BenchError("--runs: expected one at least")
    return found


def run(given: argparse.Namespace) -> int:
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
    if given.fit:
        print(*(f"{name} = {value:.3g}" for name, value in asdict(fit(rows, Costs())).items()), sep="\n")
    output.write_json(given.json, [as_json(row) for row in rows])
    return Exit.DONE


def as_json(row: PredictedRow) -> dict[str, Any]:
    return asdict(row) | {"predicted_s": row.predicted_s()}
