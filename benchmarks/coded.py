"""`gc-bench coded`: coded exchanges on shaped links, beside competitors.

Five parts, each by real processes and sockets. Every worker and the server are in a network namespace of
their own, behind a link of --mbit in each direction (`star`); this needs root.

bytes: Bytes that the server receives and sends in a step, in block gradients, beside the paper's formulas,
    and all bytes by the counters of its link.
time: Seconds per step at every redundancy and with `auto`, beside the model. There are two regimes: in one
    computing takes long, in the other exchanging. Computing is emulated: a model that sleeps.
accuracy: Steps to an accuracy: real training on digits, at full speed, without shaped links. Beside it
    seconds per step as in `time`; their product is an estimate and not a run.
speeds: Seconds per step with one worker that computes four times slower than the others, with equal blocks
    and with blocks by speed, at every redundancy. Computing is emulated.
target: Seconds to that accuracy by the wall: real training of a model of digits behind the links. Workers
    also sleep for each sample, so that many of them can share a few cores. Repeated with other seeds;
    the paper repeats ASGD ten times.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import comb
from pathlib import Path
from typing import Any

from ..coding import UncodedTimes, fastest, possible, step_seconds
from ..common.exits import Exit
from ..common.spec import parse_spec
from ..deploy.plot import panels
from ..deploy.report import result_of
from ..settings import RunSettings
from . import output
from .arguments import BenchError, amount, at_least_one, json_option, numbers, option, plot_to_write, some_of
from .estimates import MOST_SEEDS, estimate
from .jobs import nodes_of, one_slower, run_job, train
from .papers.to_target import seconds_to
from .schemes import SCHEMES
from .star import Star, check_network

PARTS = ("bytes", "time", "accuracy", "speeds", "target")
BATCH = 16  # samples per worker and step
STEPS = 10
ELEMENTS = 250_000
TARGET = 0.90  # validation accuracy
SLOWER = 4.0  # factor of the slow worker's times in the part speeds
EPOCHS = 40  # of a job that trains digits
MODELS = ("mlp", "cnn")
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
    slower: float = 1.0,
) -> CodedRow:
    """Run one job to its end and return its measurements.

    Args:
        name: name of the job in the table.
        mode: spec of the mode.
        workers: number of workers.
        seconds: emulated computation per sample.
        mbit: Mbit/s of each link in each direction.
        steps: steps of all workers; in async mode pushes of each worker.
        scheme: name in `SCHEMES`, for coded mode.
        slower: factor of the last worker's seconds; above 1 only with the scheme `coded`.

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
            worker=(lambda rank: (*program, "worker")) if slower == 1 else one_slower(workers, slower),
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
    """Measure the bytes of each scheme, print them beside the formulas, and return the rows.

    Args:
        workers: numbers of workers, measured one after the other.
        mbit: Mbit/s of each link in each direction.
    """
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
    """Return the block gradients that the server receives and sends in a step, by a scheme's formula.

    Args:
        scheme: name in `SCHEMES`.
        nodes: number of workers.
        r: redundancy.
    """
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
    """Measure for each competitor the steps to the target accuracy, and the seconds per step.

    The steps are those of real training; the seconds are measured with emulated computation.

    Args:
        workers: numbers of workers, measured one after the other.
        seed: seed of the training.
        mbit: Mbit/s of each link, for the seconds per step.
        directory: for logs.

    Returns:
        The rows of the printed table, as JSON objects.
    """
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

    Args:
        target: accuracy to reach.
        mode: spec of the mode.
        nodes: number of workers.
        seed: seed of the job.
        directory: for logs and parameters.

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


# ---- speeds


def speeds_part(nodes: int, mbit: float) -> list[CodedRow]:
    """Measure the seconds per step with one slow worker, print them, and return the rows.

    Args:
        nodes: number of workers.
        mbit: Mbit/s of each link in each direction.
    """
    headings = "r", "equal blocks, s per step", "blocks by speed, s per step", "ratio"
    print(output.table(headings, []), flush=True)
    seconds, rows = REGIMES["computing takes long"], list[CodedRow]()
    for r in possible(nodes):
        found = [
            measure(
                f"{blocks} blocks, r = {r}",
                f"coded:redundancy={r},blocks={blocks}",
                workers=nodes,
                seconds=seconds,
                mbit=mbit,
                slower=SLOWER,
            )
            for blocks in ("even", "speed")
        ]
        even, by_speed = (row.step_seconds for row in found)
        print(output.row((r, f"{even:.3f}", f"{by_speed:.3f}", f"{by_speed / even:.2f}")), flush=True)
        rows += found
    return rows


# ---- target


@dataclass(frozen=True, kw_only=True)
class TargetRow:
    """Real training with one exchange to `TARGET`, by the wall.

    Attributes:
        name: name in `COMPETITORS`.
        workers: number of workers.
        model: name of the model of digits.
        seconds: seconds to the first epoch that ends with `TARGET`, one per repetition; None if none does.
    """

    name: str
    workers: int
    model: str
    seconds: tuple[float | None, ...]


def target_settings(name: str, nodes: int, model: str, sleep: float, seed: int) -> tuple[RunSettings, str]:
    """Return the options of a job of the part `target`, and its scheme.

    Args:
        name: name in `COMPETITORS`.
        nodes: number of workers.
        model: name of the model of digits.
        sleep: seconds that a worker sleeps for each sample.
        seed: seed of the job.
    """
    mode, scheme = COMPETITORS[name]
    settings = RunSettings(
        task=f"gradwire.benchmarks.paced:digits:model={model},seconds={sleep:g}",
        workers=nodes,
        compressor="none",
        epochs=EPOCHS,
        seed=seed,
        learning_rate=rate_of(mode, nodes),
        mode=f"coded:redundancy={max(1, nodes - 1)}" if name == "CSSGD" else mode,
    )
    return settings, scheme


def target_part(
    workers: Sequence[int], model: str, sleep: float, seed: int, repeats: int, asgd_repeats: int, mbit: float
) -> list[TargetRow]:
    """Train with each exchange until an epoch ends with `TARGET`, print the seconds, and return the rows.

    Args:
        workers: numbers of workers, measured one after the other.
        model: name of the model of digits.
        sleep: seconds that a worker sleeps for each sample.
        seed: seed of the first repetition; each of the others has the next one.
        repeats: number of repetitions of each exchange but ASGD.
        asgd_repeats: number of repetitions of ASGD, whose order of pushes differs from run to run.
        mbit: Mbit/s of each link in each direction.
    """
    headings = "model", "workers", "", "repetitions", f"seconds to {TARGET:.2f}", f"against {SSGD_UNICAST}"
    print(output.table(headings, []), flush=True)
    rows: list[TargetRow] = []
    for nodes in workers:
        base: float | None = None
        for name in COMPETITORS:
            times: list[float | None] = []
            for repetition in range(asgd_repeats if name == "ASGD" else repeats):
                settings, scheme = target_settings(name, nodes, model, sleep, seed + repetition)
                times.append(_seconds_to_target(settings, scheme, mbit))
                output.say(f"{model}, {nodes} workers, {name}, seed {settings.seed}: {times[-1]} s")
            reached = [each for each in times if each is not None]
            shown, against = f"{len(reached)} of {len(times)} do", ""
            if len(reached) == len(times):
                mean = sum(reached) / len(reached)
                base = mean if name == SSGD_UNICAST else base
                shown, against = str(estimate(reached)), f"{mean / base:.2f}" if base else ""
            print(output.row((model, nodes, name, len(times), shown, against)), flush=True)
            rows.append(TargetRow(name=name, workers=nodes, model=model, seconds=tuple(times)))
    return rows


def _seconds_to_target(settings: RunSettings, scheme: str, mbit: float) -> float | None:
    """Run a job behind shaped links; return the seconds to the first epoch that ends with `TARGET`, or
    None."""
    program = "gradwire.benchmarks.schemes", scheme
    with Star(nodes_of(settings.workers), mbit) as star, tempfile.TemporaryDirectory() as directory:
        status = run_job(
            settings,
            Path(directory),
            server=(*program, "server"),
            worker=lambda rank: (*program, "worker"),
            star=star,
        )
    result = result_of(settings, status)
    return seconds_to(TARGET, result.accuracy_by_epoch, result.seconds_by_epoch)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option(parser, "--parts", some_of(PARTS), ",".join(PARTS), "NAME,...", "parts of the benchmark to run")
    option(parser, "--mbit", at_least_one, 100, "N", "Mbit/s of each link in each direction")
    text = "numbers of workers in the parts bytes, accuracy and target, one run for each"
    option(parser, "--workers", numbers(16), "2,4,8", "N,...", text)
    option(parser, "--nodes", at_least_one, 4, "N", "number of workers in the parts time and speeds")
    option(parser, "--seed", at_least_one, 1, "N", "seed of the parts accuracy and target")
    text = f"model of digits in the part target: {', '.join(MODELS)}"
    option(parser, "--model", model_name, "mlp", "NAME", text)
    option(parser, "--sleep", amount, 0.002, "N", "seconds of sleep for each sample in the part target")
    option(parser, "--repeats", repetitions, 1, "N", "repetitions of the part target, each with another seed")
    option(parser, "--asgd-repeats", repetitions, 10, "N", "repetitions of ASGD in the part target")
    json_option(parser)
    text = "PNG or SVG file for a picture of the seconds per step"
    parser.add_argument("--plot", type=plot_to_write, metavar="FILE", help=text)


def repetitions(text: str) -> int:
    """Return a number of repetitions, of which `estimate` can take the mean. Raises BenchError for others."""
    found = at_least_one(text)
    if found > MOST_SEEDS:
        raise BenchError(f"expected 1 to {MOST_SEEDS} repetitions, got {found}")
    return found


def model_name(text: str) -> str:
    """Return the name of a model of digits. Raises BenchError if it is unknown."""
    if text not in MODELS:
        raise BenchError(f"--model: expected {' or '.join(MODELS)}, got {text!r}")
    return text


def plot(path: Path, rows: Sequence[CodedRow], nodes: int) -> None:
    """Draw seconds per step over redundancy, a panel for each regime, and write the picture to `path`.

    Args:
        path: file to write.
        rows: rows of `time_part`.
        nodes: number of workers.
    """
    figure, drawn = panels(list(REGIMES))
    for axes, seconds in zip(drawn, REGIMES.values(), strict=True):
        found = [row for row in rows if row.seconds_per_sample == seconds and row.redundancy != "auto"]
        r = [int(row.redundancy) for row in found]
        times = UncodedTimes(seconds * BATCH, found[0].step_seconds - seconds * BATCH)
        axes.plot(r, [row.step_seconds for row in found], "o-", label="measured")
        axes.plot(r, [step_seconds(times, nodes, each) for each in r], "x--", label="model, from r = 1")
        axes.set(xlabel="redundancy r", ylim=(0, None), xticks=r)
    drawn[0].set(ylabel="seconds per step")
    drawn[-1].legend(frameon=False)
    figure.savefig(path, dpi=150)


def run(given: argparse.Namespace) -> int:
    """Run the chosen parts of the benchmark; return the exit code."""
    check_network()
    if given.plot and "time" not in given.parts:
        raise BenchError("--plot: needs the part time, which is not among --parts")
    plain: dict[str, Any] = {}
    if "bytes" in given.parts:
        plain["bytes"] = [asdict(row) for row in bytes_part(given.workers, given.mbit)]
    if "time" in given.parts:
        rows = time_part(given.nodes, given.mbit)
        plain["time"] = [asdict(row) for row in rows]
        if given.plot:
            plot(given.plot, rows, given.nodes)
    if "accuracy" in given.parts:
        with tempfile.TemporaryDirectory() as name:
            plain["accuracy"] = accuracy_part(given.workers, given.seed, given.mbit, Path(name))
    if "speeds" in given.parts:
        plain["speeds"] = [asdict(row) for row in speeds_part(given.nodes, given.mbit)]
    if "target" in given.parts:
        rows_of_target = target_part(
            given.workers,
            given.model,
            given.sleep,
            given.seed,
            given.repeats,
            given.asgd_repeats,
            given.mbit,
        )
        plain["target"] = [asdict(row) for row in rows_of_target]
    output.write_json(given.json, plain)
    return Exit.DONE
