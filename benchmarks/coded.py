"""`gc-bench coded`: coded exchanges on shaped links, beside competitors.

Three parts, each by real processes and sockets. Every worker and the server are in a network namespace of
their own, behind a link of --mbit in each direction (`star`); this needs root.

bytes: Bytes that the server receives and sends in a step, in block gradients, beside the paper's formulas,
    and all bytes by the counters of its link.
time: Seconds per step at every redundancy and with `auto`, beside the model. There are two regimes: in one
    computing takes long, in the other exchanging. Computing is emulated: a model that sleeps.
accuracy: Steps to an accuracy: real training on digits, at full speed, without shaped links. Beside it
    seconds per step as in `time`; their product is an estimate and not a run.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import comb
from pathlib import Path
from typing import Any

from ..coded.arithmetic import UncodedTimes, fastest, possible, step_seconds
from ..common.exits import Exit
from ..common.spec import parse_spec
from ..settings import RunSettings
from . import output
from .arguments import BenchError, at_least_one, json_option, numbers, option, some_of
from .jobs import nodes_of, run_job, train
from .schemes import SCHEMES
from .star import Star, check_network

PARTS = ("bytes", "time", "accuracy")
BATCH = 16  # samples per worker and step
STEPS = 10
ELEMENTS = 250_000
SEED = 1  # of the part accuracy
TARGET = 0.90  # validation accuracy
EPOCHS = 40  # of a job that trains digits
# Seconds per sample of emulated computation: a batch takes much longer than an exchange, or much shorter.
REGIMES = {"computing takes long": 0.1, "exchanging takes long": 0.002}
SSGD_UNICAST = "SSGD, unicast"
# By name: mode, and the scheme, which only coded mode uses.
COMPETITORS = {
    SSGD_UNICAST: ("coded", "unicast"),
    "SSGD, summed and multicast": ("coded", "summed"),
    "CSSGD": ("coded", "coded"),
    "parameter server": ("sync", "coded"),
    "ASGD": ("async", "coded"),
}


@dataclass(frozen=True, kw_only=True)
class CodedRow:
    """The measurements of one job, per step. Bytes are in units of one block's gradient.

    Attributes:
        name: name of the job in the table.
        workers: number of workers.
        redundancy: redundancy of coded mode, or "auto"; "" in other modes.
        seconds_per_sample: emulated computation.
        step_seconds: seconds of a step.
        blocks_up, blocks_down: block gradients that the server receives and sends.
        link_up, link_down: the same by the counters of its link, with all headers.
        ended_with: redundancy of the last step; 0 in other modes.
    """

    name: str
    workers: int
    redundancy: str
    seconds_per_sample: float
    step_seconds: float
    blocks_up: float
    blocks_down: float
    link_up: float
    link_down: float
    ended_with: int


def measure(
    name: str,
    mode: str,
    *,
    workers: int,
    seconds: float,
    mbit: float,
    steps: int = STEPS,
    scheme: str = "coded",
) -> CodedRow:
    """Run one job to its end and return its measurements.

    Args:
        name: name of the job in the table.
        mode: spec of the mode.
        seconds: emulated computation per sample.
        mbit: Mbit/s of each link in each direction.
        steps: steps of all workers; in async mode pushes of each worker.
        scheme: name in `SCHEMES`, for coded mode.

    Raises:
        BenchError: if the job does not finish.
    """
    samples = BATCH * steps * workers
    run = RunSettings(
        task=f"gradwire.benchmarks.paced:still:elements={ELEMENTS},seconds={seconds},samples={samples}",
        workers=workers,
        compressor="none",
        epochs=1,
        batch_size=BATCH,
        mode=mode,
    )
    program = "gradwire.benchmarks.schemes", scheme
    with Star(nodes_of(workers), mbit) as star, tempfile.TemporaryDirectory() as directory:
        status = run_job(
            run,
            Path(directory),
            server=(*program, "server"),
            worker=lambda rank: (*program, "worker"),
            star=star,
        )
        up, down = star.carried("server")
    spec = parse_spec("mode", mode)
    block_bytes = 4 * ELEMENTS * status.version
    parameters = 4 * ELEMENTS  # one worker uploads them at the start and the end, the other workers load them
    return CodedRow(
        name=name,
        workers=workers,
        redundancy=spec.options.get("redundancy", "1") if spec.name == "coded" else "",
        seconds_per_sample=seconds,
        step_seconds=status.training_seconds / steps,
        blocks_up=status.traffic.payload_bytes_up / block_bytes,
        blocks_down=(status.traffic.raw_bytes_down - (workers - 1) * parameters) / block_bytes,
        link_up=(up - 2 * parameters) / block_bytes,
        link_down=(down - (workers - 1) * parameters) / block_bytes,
        ended_with=status.redundancy,
    )


# ---- bytes


def bytes_part(workers: Sequence[int], mbit: float) -> list[CodedRow]:
    """Measure the bytes of each scheme with each number of workers, print them beside the formulas, and
    return the rows."""
    headings = "workers", "exchange", "r", "up", "formula", "ratio", "down", "formula", "ratio"
    print(output.table((*headings, "link up", "link down"), []), flush=True)
    rows: list[CodedRow] = []
    for nodes in workers:
        for scheme in SCHEMES:
            for r in possible(nodes) if scheme in ("coded", "uncoded") else [1]:
                row = measure(
                    f"{scheme} {nodes} {r}",
                    f"coded:redundancy={r}",
                    workers=nodes,
                    seconds=0.0,
                    mbit=mbit,
                    steps=4,
                    scheme=scheme,
                )
                rows.append(row)
                up, down = formula(scheme, nodes, r)
                counted = [
                    *(f"{row.blocks_up:.3f}", f"{up:.3f}", f"{row.blocks_up / up:.4f}"),
                    *(f"{row.blocks_down:.3f}", f"{down:.3f}", f"{row.blocks_down / down:.4f}"),
                    *(f"{row.link_up / up:.3f}", f"{row.link_down / down:.3f}"),
                ]
                print(output.row((nodes, scheme, r, *counted)), flush=True)
    return rows


def formula(scheme: str, nodes: int, r: int) -> tuple[float, float]:
    """Return the block gradients that the server receives and sends in a step, by the formula of a scheme
    with this redundancy."""
    up, targets = {
        "coded": (comb(nodes, r + 1) * (r + 1) / r, r),
        "uncoded": (comb(nodes, r) * (nodes - r), 1),
        "unicast": (comb(nodes, r) * (nodes - 1), 1),
        "multicast": (comb(nodes, r), nodes - 1),
        "summed": (nodes, nodes - 1),
    }[scheme]
    return up, up * targets


# ---- time


def time_part(nodes: int, mbit: float) -> list[CodedRow]:
    """Measure the seconds per step at each redundancy, print them beside the model T(r), and return the rows.

    The model starts from the measured step without redundancy.
    """
    print(output.table(("regime", "r", "seconds per step", "model", "measured / model"), []), flush=True)
    rows: list[CodedRow] = []
    for regime, seconds in REGIMES.items():

        def job(redundancy: str, steps: int, regime: str = regime, seconds: float = seconds) -> CodedRow:
            name, mode = f"{regime}, r = {redundancy}", f"coded:redundancy={redundancy}"
            return measure(name, mode, workers=nodes, seconds=seconds, mbit=mbit, steps=steps)

        found = {r: job(str(r), STEPS) for r in possible(nodes)}
        times = UncodedTimes(seconds * BATCH, found[1].step_seconds - seconds * BATCH)
        for r, row in found.items():
            model = step_seconds(times, nodes, r)
            cells = f"{row.step_seconds:.3f}", f"{model:.3f}", f"{row.step_seconds / model:.2f}"
            print(output.row((regime, r, *cells)))
        auto = job("auto", 2 * STEPS)
        best = min(found, key=lambda r: found[r].step_seconds)
        print(output.row((regime, f"auto, ended with {auto.ended_with}", f"{auto.step_seconds:.3f}", "", "")))
        names = f"fastest: r = {best}; the model names {fastest(times, nodes)}"
        print(output.row((regime, "", names, "", "")), flush=True)
        rows += [*found.values(), auto]
    return rows


# ---- accuracy


def accuracy_part(workers: Sequence[int], seed: int, mbit: float, directory: Path) -> list[dict[str, Any]]:
    """Measure for each number of workers and each competitor the steps to the target accuracy, by real
    training, and the seconds per step, with emulated computation. Return the rows as JSON objects."""
    headings = "workers", "", f"steps to {TARGET:.2f}", "seconds per step", "product, s"
    print(output.table((*headings, f"against {SSGD_UNICAST}"), []), flush=True)
    rows: list[dict[str, Any]] = []
    for nodes in workers:
        synchronous = steps_to(TARGET, "coded", nodes, seed, directory / f"{nodes}-sync")
        asynchronous = steps_to(TARGET, "async", nodes, seed, directory / f"{nodes}-async")
        base = 0.0
        for name, (mode, scheme) in COMPETITORS.items():
            coded = name == "CSSGD"
            spec = f"coded:redundancy={max(1, nodes - 1)}" if coded else mode
            seconds = REGIMES["exchanging takes long"]
            row = measure(name, spec, workers=nodes, seconds=seconds, mbit=mbit, scheme=scheme)
            # A step of ASGD is one push of each worker.
            steps = asynchronous / nodes if mode == "async" else synchronous
            product = steps * row.step_seconds
            base = base or product
            shown = f"{name}, r = {row.redundancy}" if coded else name
            times = f"{row.step_seconds:.3f}", f"{product:.1f}", f"{product / base:.2f}"
            print(output.row((nodes, shown, f"{steps:.0f}", *times)), flush=True)
            rows.append({"name": name, "steps": steps, **asdict(row)})
    return rows


def rate_of(mode: str, nodes: int) -> float:
    """Return the learning rate for digits: larger where a version is made from the batches of all workers."""
    return 0.1 if mode == "async" else 0.05 * nodes


def steps_to(target: float, mode: str, nodes: int, seed: int, directory: Path) -> int:
    """Train digits; return the number of versions after which an epoch first ends with this accuracy.

    Raises:
        BenchError: if no epoch reaches it.
    """
    rate = rate_of(mode, nodes)
    settings = RunSettings(
        workers=nodes, compressor="none", epochs=EPOCHS, seed=seed, learning_rate=rate, mode=mode
    )
    result = train(settings, directory)
    for epoch, accuracy in enumerate(result.accuracy_by_epoch, start=1):
        if (accuracy or 0.0) >= target:
            return result.steps * epoch // result.epochs
    raise BenchError(f"{mode}: did not reach an accuracy of {target} in {settings.epochs} epochs")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option(parser, "--parts", some_of(PARTS), ",".join(PARTS), "NAME,...", "parts to run")
    option(parser, "--mbit", at_least_one, 100, "N", "Mbit/s of each link in each direction")
    text = "numbers of workers in bytes and accuracy"
    option(parser, "--workers", numbers(16), "2,4,8", "N,...", text)
    option(parser, "--nodes", at_least_one, 4, "N", "number of workers in time")
    json_option(parser)


def run(given: argparse.Namespace) -> int:
    """Run the chosen parts of the benchmark; return the exit code."""
    check_network()
    plain: dict[str, Any] = {}
    if "bytes" in given.parts:
        plain["bytes"] = [asdict(row) for row in bytes_part(given.workers, given.mbit)]
    if "time" in given.parts:
        plain["time"] = [asdict(row) for row in time_part(given.nodes, given.mbit)]
    if "accuracy" in given.parts:
        with tempfile.TemporaryDirectory() as name:
            plain["accuracy"] = accuracy_part(given.workers, SEED, given.mbit, Path(name))
    output.write_json(given.json, plain)
    return Exit.DONE
