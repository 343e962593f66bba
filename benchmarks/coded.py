"""`gc-bench coded`: coded exchanges on shaped links, beside what they compete with.

Three parts, each by real processes and sockets. Every worker and the server are in a network namespace of
their own, behind a link of --mbit in each direction (`star`); this needs root.

bytes     What the server gets and hands on in a step, in block gradients, against the formulas of the paper,
          and all bytes by the counters of its link.
time      Seconds per step at every redundancy and with `auto`, in a regime where computing takes long and in
          one where exchanging does, against the model. Computing is emulated: a model that sleeps.
accuracy  Steps to an accuracy: real training on digits, at full speed, nothing shaped. Beside it seconds per
          step as in `time`; their product is an estimate and not a run.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import comb
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from ..coding import StepTimes, fastest, possible, step_seconds
from ..deploy.config import RunOptions
from ..deploy.daemons import server_arguments, worker_arguments
from ..deploy.engine import PARAMETERS, Plan, train
from ..deploy.interrupt import Interrupt
from ..deploy.processes import Children
from ..deploy.report import write_atomically
from ..deploy.status import StatusClient
from ..exits import Exit
from ..proto.messages import Phase, StatusReply
from .arguments import BenchError, at_least_one, check_files, check_modules, numbers, some_of
from .modes import Quiet
from .schemes import SCHEMES
from .star import Star, check_network

PARTS = ("bytes", "time", "accuracy")
PORT = 50051
PATIENCE_S = 600.0
BATCH = 16  # samples per worker and step
STEPS = 10
ELEMENTS = 250_000
TARGET = 0.90  # validation accuracy
# Seconds per sample of emulated computation: 16 of them take long beside an exchange, or are nearly nothing.
REGIMES = {"computing takes long": 0.1, "exchanging takes long": 0.002}
SSGD_UNICAST = "SSGD, unicast"
SCHEME_OF = {SSGD_UNICAST: "unicast", "SSGD, summed and multicast": "summed"}
COMPETITORS: dict[str, dict[str, Any]] = {
    SSGD_UNICAST: {"mode": "coded"},
    "SSGD, summed and multicast": {"mode": "coded"},
    "CSSGD": {"mode": "coded"},
    "parameter server": {"mode": "sync"},
    "ASGD": {"mode": "async"},
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One job. blocks_up, blocks_down: block gradients that came to the server in a step, and that it handed
    on. link_up, link_down: the same by the counters of its link, with all headers."""

    name: str
    workers: int
    redundancy: str
    seconds_per_sample: float
    step_seconds: float
    blocks_up: float
    blocks_down: float
    link_up: float
    link_down: float
    ended_with: int  # redundancy of the last step, 0 where there is none


def measure(
    name: str,
    options: Mapping[str, Any],
    *,
    workers: int,
    seconds: float,
    mbit: float,
    directory: Path,
    steps: int = STEPS,
    scheme: str = "coded",
) -> Row:
    """One job of so many steps to its end. Raises BenchError when it does not come to one.

    scheme: of coded mode, a name of `SCHEMES`.
    """
    pushes = steps * workers if options.get("mode") == "async" else steps
    samples = BATCH * steps * workers
    run = RunOptions(
        task=f"gradwire.benchmarks.paced:still:elements={ELEMENTS},seconds={seconds},samples={samples}",
        workers=workers,
        compressor="none",
        epochs=1,
        batch_size=BATCH,
        **options,
    )
    nodes = ["server", *(f"worker{rank}" for rank in range(workers))]
    with Star(nodes, mbit) as star, Children(directory) as children:
        address = star.address("server")
        program = "gradwire.benchmarks.schemes"
        arguments = [
            *(scheme, "server", *server_arguments(run, PORT, directory / PARAMETERS)),
            *("--host=0.0.0.0", "--insecure"),
        ]
        server = children.start("server", program, arguments, star.prefix("server"))
        for rank in range(workers):
            arguments = [scheme, "worker", *worker_arguments(run, PORT, rank), f"--server={address}:{PORT}"]
            node = f"worker{rank}"
            children.start(node, program, arguments, star.prefix(node))
        with StatusClient(f"{address}:{PORT}") as client:
            deadline = time.monotonic() + PATIENCE_S
            while (status := client.ask()) is None or status.phase is not Phase.FINISHED:
                if server.code is not None or time.monotonic() > deadline:
                    raise BenchError(f"{name}: {server.ending}: {server.last_lines()}")
                time.sleep(0.05)
        up, down = star.carried("server")
        log = server.log.read_text()
    chosen = re.findall(r"exchange with redundancy (\d+)", log)
    block_bytes = 4 * ELEMENTS * status.version
    parameters = 4 * ELEMENTS  # one worker brings them, the others get them; a copy goes up at the end
    return Row(
        name=name,
        workers=workers,
        redundancy=str(options.get("redundancy", "1")) if options.get("mode") == "coded" else "",
        seconds_per_sample=seconds,
        step_seconds=status.training_seconds / pushes * (workers if options.get("mode") == "async" else 1),
        blocks_up=status.traffic.payload_bytes_up / block_bytes,
        blocks_down=(status.traffic.raw_bytes_down - (workers - 1) * parameters) / block_bytes,
        link_up=(up - 2 * parameters) / block_bytes,
        link_down=(down - (workers - 1) * parameters) / block_bytes,
        ended_with=int(chosen[-1]) if chosen else 0,
    )


# ---- bytes


def bytes_part(workers: Sequence[int], mbit: float, directory: Path) -> tuple[str, list[Row]]:
    """Counted against the formulas."""
    lines = [
        "| workers | exchange | r | up | formula | ratio | down | formula | ratio | link up | link down |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    rows: list[Row] = []
    for nodes in workers:
        for scheme in SCHEMES:
            for r in possible(nodes) if scheme in ("coded", "uncoded") else [1]:
                row = measure(
                    f"{scheme} {nodes} {r}",
                    {"mode": "coded", "redundancy": str(r)},
                    scheme=scheme,
                    workers=nodes,
                    seconds=0.0,
                    mbit=mbit,
                    directory=directory / f"bytes-{len(rows)}",
                    steps=4,
                )
                rows.append(row)
                up, down = formula(scheme, nodes, r)
                lines.append(
                    f"| {nodes} | {scheme} | {r} | {row.blocks_up:.3f} | {up:.3f} | {row.blocks_up / up:.4f} "
                    f"| {row.blocks_down:.3f} | {down:.3f} | {row.blocks_down / down:.4f} "
                    f"| {row.link_up / up:.3f} | {row.link_down / down:.3f} |"
                )
                print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines), rows


def formula(scheme: str, nodes: int, r: int) -> tuple[float, float]:
    """Block gradients that come to the server and go from it, as the paper has them and times the targets."""
    match scheme:
        case "coded":
            up = comb(nodes, r + 1) * (r + 1) / r
            return up, up * r
        case "uncoded":
            up = (nodes - r) * comb(nodes, r)
            return up, up
        case "unicast":
            up = (nodes - 1) * comb(nodes, r)
            return up, up
        case "multicast":
            return comb(nodes, r), comb(nodes, r) * (nodes - 1)
        case _:
            return nodes, nodes * (nodes - 1)


# ---- time


def time_part(nodes: int, mbit: float, directory: Path) -> tuple[str, list[Row]]:
    """T(r), measured and as the model has it from the step without redundancy."""
    lines = [
        "| regime | r | seconds per step | model | measured / model |",
        "|---|---|---|---|---|",
    ]
    rows: list[Row] = []
    for regime, seconds in REGIMES.items():
        found: dict[int, Row] = {}
        times: StepTimes | None = None
        for r in possible(nodes):
            row = measure(
                f"{regime}, r = {r}",
                {"mode": "coded", "redundancy": str(r)},
                workers=nodes,
                seconds=seconds,
                mbit=mbit,
                directory=directory / f"time-{len(rows)}",
            )
            rows.append(row)
            found[r] = row
            if times is None:
                times = StepTimes(seconds * BATCH, row.step_seconds - seconds * BATCH)
            model = step_seconds(times, nodes, r)
            ratio = row.step_seconds / model
            lines.append(f"| {regime} | {r} | {row.step_seconds:.3f} | {model:.3f} | {ratio:.2f} |")
            print(lines[-1], file=sys.stderr, flush=True)
        assert times is not None
        auto = measure(
            f"{regime}, auto",
            {"mode": "coded", "redundancy": "auto"},
            workers=nodes,
            seconds=seconds,
            mbit=mbit,
            directory=directory / f"time-{len(rows)}",
            steps=2 * STEPS,
        )
        rows.append(auto)
        best = min(found, key=lambda r: found[r].step_seconds)
        named = fastest(times, nodes)
        lines.append(f"| {regime} | auto, ended with {auto.ended_with} | {auto.step_seconds:.3f} | | |")
        lines.append(f"| {regime} | | fastest: r = {best}; the model names {named} | | |")
        print("\n".join(lines[-2:]), file=sys.stderr, flush=True)
    return "\n".join(lines), rows


# ---- accuracy


def accuracy_part(
    workers: Sequence[int], seed: int, mbit: float, directory: Path
) -> tuple[str, list[dict[str, Any]]]:
    """Steps to the target by real training, and seconds per step by emulated computation."""
    lines = [
        f"| workers | | steps to {TARGET:.2f} | seconds per step | product, s | against {SSGD_UNICAST} |",
        "|---|---|---|---|---|---|",
    ]
    rows: list[dict[str, Any]] = []
    for nodes in workers:
        synchronous = steps_to(TARGET, {"mode": "coded"}, nodes, seed, directory / f"{nodes}-sync")
        asynchronous = steps_to(TARGET, {"mode": "async"}, nodes, seed, directory / f"{nodes}-async")
        base = 0.0
        for name, changes in COMPETITORS.items():
            options = dict(changes)
            if name == "CSSGD":
                options["redundancy"] = str(max(1, nodes - 1))
            row = measure(
                name,
                options,
                workers=nodes,
                seconds=REGIMES["exchanging takes long"],
                mbit=mbit,
                directory=directory / f"accuracy-{len(rows)}",
                scheme=SCHEME_OF.get(name, "coded"),
            )
            # A step of ASGD is one push of each worker.
            steps = asynchronous / nodes if name == "ASGD" else synchronous
            product = steps * row.step_seconds
            base = base or product
            shown = f"{name}, r = {options['redundancy']}" if name == "CSSGD" else name
            times = f"{row.step_seconds:.3f} | {product:.1f} | {product / base:.2f}"
            lines.append(f"| {nodes} | {shown} | {steps:.0f} | {times} |")
            print(lines[-1], file=sys.stderr, flush=True)
            rows.append({"name": name, "steps": steps, **asdict(row)})
    return "\n".join(lines), rows


def steps_to(target: float, changes: Mapping[str, Any], nodes: int, seed: int, directory: Path) -> int:
    """Versions after which the validation accuracy is first this high, by the epoch. Raises BenchError."""
    # A step of all workers is worth a larger rate than that of one, whose version has a batch of its own.
    rate = 0.1 if changes["mode"] == "async" else 0.05 * nodes
    options = RunOptions(
        workers=nodes, compressor="none", epochs=40, seed=seed, learning_rate=rate, **changes
    )
    with Interrupt() as interrupt:
        status: StatusReply = train(Plan(options=options, directory=directory), Quiet(), interrupt)
    for done in status.evaluations:
        if done.metrics.get("accuracy", 0.0) >= target:
            return done.version
    raise BenchError(f"{changes}: did not come to an accuracy of {target} in {options.epochs} epochs")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", type=some_of(PARTS), default=list(PARTS), help=",".join(PARTS))
    parser.add_argument("--mbit", type=at_least_one, default=100, help="of every link, in each direction")
    parser.add_argument("--workers", type=numbers(16), default=[2, 4, 8], help="in bytes and accuracy: 2,4,8")
    parser.add_argument("--nodes", type=at_least_one, default=4, help="in time")
    parser.add_argument("--seed", type=at_least_one, default=1, help="of the trainings")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows here")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="of the times, as PNG or SVG")


def plot(path: Path, rows: Sequence[Row], nodes: int) -> None:
    """Seconds per step over redundancy, a panel for each regime."""
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(5 * len(REGIMES), 3.6), layout="constrained")
    panels = figure.subplots(1, len(REGIMES), squeeze=False)[0]
    for axes, (regime, seconds) in zip(panels, REGIMES.items(), strict=True):
        found = [row for row in rows if row.seconds_per_sample == seconds and row.redundancy != "auto"]
        r = [int(row.redundancy) for row in found]
        times = StepTimes(seconds * BATCH, found[0].step_seconds - seconds * BATCH)
        axes.plot(r, [row.step_seconds for row in found], "o-", label="measured")
        axes.plot(r, [step_seconds(times, nodes, each) for each in r], "x--", label="model, from r = 1")
        axes.set(title=regime, xlabel="redundancy r", ylim=(0, None), xticks=r)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set(ylabel="seconds per step")
    panels[-1].legend(frameon=False)
    figure.savefig(path, dpi=150)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)  # so that no process and no network is left


def run(given: argparse.Namespace) -> int:
    check_files(given.json, given.plot)
    check_network()
    signal.signal(signal.SIGTERM, _end)
    if given.plot:
        check_modules("matplotlib")
        if "time" not in given.parts:
            raise BenchError("--plot: shows the part time, which is not among --parts")
    plain: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        if "bytes" in given.parts:
            text, rows = bytes_part(given.workers, given.mbit, directory)
            plain["bytes"] = [asdict(row) for row in rows]
            print(text, flush=True)
        if "time" in given.parts:
            text, rows = time_part(given.nodes, given.mbit, directory)
            plain["time"] = [asdict(row) for row in rows]
            print(text, flush=True)
            if given.plot:
                plot(given.plot, rows, given.nodes)
        if "accuracy" in given.parts:
            text, plain["accuracy"] = accuracy_part(given.workers, given.seed, given.mbit, directory)
            print(text, flush=True)
    if given.json:
        write_atomically(given.json, json.dumps(plain, indent=2) + "\n")
    return Exit.DONE
