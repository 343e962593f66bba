"""`gc-bench modes`: how fast and how well every mode trains, with even workers, with one that is ten times
slower, and with workers that come and go.

Real processes and sockets on this machine, real training on digits. The time that computing takes is made
(`paced`: so many seconds per sample), so that four workers can share two cores; speeds are compared within
one invocation. Workers that come and go are killed every few seconds, one after the other, and started again.

`--local` compares numbers of local steps instead, at full speed: adaptive, 8 and 16, each with and without
correction, against sync, over several seeds.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..deploy.config import RunOptions
from ..deploy.daemons import HOST, server_arguments, worker_arguments
from ..deploy.engine import PARAMETERS, Plan, free_port, train
from ..deploy.interrupt import Interrupt
from ..deploy.processes import Child, Children
from ..deploy.report import result_of, write_atomically
from ..deploy.status import StatusClient
from ..exits import Exit
from ..proto.messages import Phase, StatusReply
from .accuracy import estimate, seed_list
from .arguments import BenchError, at_least_one, check_files, check_modules

WORKERS = 4
SLOWER = 10
SECONDS_PER_SAMPLE = 0.001
LEASE_S = 1.0
KILL_EVERY_S = 3.0
PATIENCE_S = 600.0
SAMPLES = 1408  # of digits, in an epoch
MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "sync --backup 1": {"backup": 1},
    "stale --staleness 4": {"mode": "stale"},
    "async --staleness-lr inverse": {"mode": "async", "staleness_lr": "inverse"},
    "local": {"mode": "local"},
}
SITUATIONS = ("even", "one slow", "come and go")
LOCAL: dict[str, dict[str, Any]] = {
    "sync": {},
    **{
        f"local --local-steps {steps} --correction {correction:g}": {
            "mode": "local",
            "local_steps": steps,
            "correction": correction,
        }
        for correction in (0.1, 0.0)
        for steps in ("adaptive", "8", "16")
    },
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One run. samples_per_second: trained on, of each epoch once. largest_staleness: clocks in stale mode,
    versions in async mode. curve: (seconds, accuracy) after each epoch."""

    mode: str
    situation: str
    seconds: float
    samples_per_second: float
    accuracy: float
    refused_pushes: int
    largest_staleness: int
    repeated_samples: int
    kills: int
    curve: tuple[tuple[float, float], ...]


class Quiet:
    """Nobody is watching."""

    def update(self, status: StatusReply, alive: int) -> None: ...

    def note(self, text: str) -> None: ...


def measure(mode: str, situation: str, epochs: int, seed: int, directory: Path) -> Row:
    """One job to its end. Raises BenchError when it does not come to one."""
    options = RunOptions(
        task=f"gradwire.benchmarks.paced:digits:seconds={SECONDS_PER_SAMPLE}",
        workers=WORKERS,
        epochs=epochs,
        seed=seed,
        **MODES[mode],
    )
    chance, kills = random.Random(seed), 0
    with Children(directory) as children:
        port = free_port()
        server = children.start(
            "server",
            "gradwire.server.cli",
            [*server_arguments(options, port, directory / PARAMETERS), f"--lease-seconds={LEASE_S}"],
        )

        def start(rank: int) -> Child:
            slower = SLOWER if situation == "one slow" and rank == WORKERS - 1 else 1
            arguments = [str(slower), *worker_arguments(options, port, rank)]
            return children.start(f"worker-{rank}-{kills}", "gradwire.benchmarks.paced", arguments)

        workers = [start(rank) for rank in range(WORKERS)]
        killed_at = time.monotonic()
        with StatusClient(f"{HOST}:{port}") as client:
            deadline = time.monotonic() + PATIENCE_S
            while (status := client.ask()) is None or status.phase is not Phase.FINISHED:
                if server.code is not None or time.monotonic() > deadline:
                    raise BenchError(f"{mode}, {situation}: {server.ending}: {server.last_lines()}")
                time.sleep(0.2)
                if situation != "come and go" or status is None:
                    continue
                whole = sum(member.attached and member.pushes > 0 for member in status.members) == WORKERS
                if not whole or status.phase is not Phase.RUNNING:
                    killed_at = time.monotonic()
                elif time.monotonic() - killed_at > KILL_EVERY_S / 2:
                    rank = chance.randrange(WORKERS)
                    workers[rank].send(signal.SIGKILL)
                    kills += 1
                    workers[rank] = start(rank)
    result = result_of(options, status)
    pairs = zip(result.seconds_by_epoch, result.accuracy_by_epoch, strict=True)
    return Row(
        mode=mode,
        situation=situation,
        seconds=result.seconds,
        samples_per_second=status.epoch * SAMPLES / result.seconds,
        accuracy=result.validation_accuracy or 0.0,
        refused_pushes=result.refused_pushes,
        largest_staleness=result.largest_staleness,
        repeated_samples=result.repeated_samples,
        kills=kills,
        curve=tuple((at, accuracy) for at, accuracy in pairs if at is not None and accuracy is not None),
    )


def table(rows: Sequence[Row]) -> str:
    """Markdown; the pace is relative to the same mode with even workers, and to sync with such workers."""
    even = {row.mode: row.samples_per_second for row in rows if row.situation == "even"}
    sync = {row.situation: row.samples_per_second for row in rows if row.mode == "sync"}
    lines = [
        "| mode | workers | samples/s | of even | of sync | accuracy | refused | staleness | twice | kills |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        of_even = f"{row.samples_per_second / even[row.mode]:.2f}" if row.mode in even else "–"
        of_sync = f"{row.samples_per_second / sync[row.situation]:.2f}" if row.situation in sync else "–"
        lines.append(
            f"| `{row.mode}` | {row.situation} | {row.samples_per_second:.0f} | {of_even} | {of_sync} "
            f"| {row.accuracy:.3f} | {row.refused_pushes} | {row.largest_staleness} | {row.repeated_samples} "
            f"| {row.kills} |"
        )
    return "\n".join(lines)


def plot(path: Path, rows: Sequence[Row]) -> None:
    """Accuracy over time, one panel for each situation."""
    from matplotlib.figure import Figure

    situations = list(dict.fromkeys(row.situation for row in rows))
    figure: Any = Figure(figsize=(5 * len(situations), 4), layout="constrained")
    panels = figure.subplots(1, len(situations), sharey=True, squeeze=False)[0]
    for axes, situation in zip(panels, situations, strict=True):
        for row in rows:
            if row.situation == situation and row.curve:
                seconds, accuracies = zip(*row.curve, strict=True)
                axes.plot(seconds, accuracies, label=row.mode)
        axes.set(title=situation, xlabel="seconds")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set(ylabel="validation accuracy")
    panels[-1].legend(loc="lower right", frameon=False)
    figure.savefig(path, dpi=150)


def local_table(seeds: Sequence[int], epochs: int, directory: Path) -> tuple[str, list[dict[str, Any]]]:
    """Accuracy of every number of local steps against sync, over seeds."""
    found: dict[str, list[tuple[float, float, float]]] = {}
    for name, changes in LOCAL.items():
        for seed in seeds:
            options = RunOptions(workers=WORKERS, compressor="none", epochs=epochs, seed=seed, **changes)
            with Interrupt() as interrupt:
                status = train(Plan(options=options, directory=directory / f"{seed}"), Quiet(), interrupt)
            result = result_of(options, status)
            per_step = result.steps / (result.local_steps or result.steps)
            found.setdefault(name, []).append((result.validation_accuracy or 0.0, per_step, result.seconds))
            print(f"{name}, seed {seed}: {result.validation_accuracy}", file=sys.stderr, flush=True)
    lines = ["| | accuracy | against sync | rounds per step |", "|---|---|---|---|"]
    baseline = [accuracy for accuracy, _, _ in found["sync"]]
    rows: list[dict[str, Any]] = []
    for name, runs in found.items():
        accuracies = [accuracy for accuracy, _, _ in runs]
        differences = [ours - theirs for ours, theirs in zip(accuracies, baseline, strict=True)]
        per_step = sum(each for _, each, _ in runs) / len(runs)
        lines.append(f"| `{name}` | {estimate(accuracies)} | {estimate(differences)} | {per_step:.2f} |")
        rows.append({"name": name, "accuracies": accuracies, "rounds_per_step": per_step})
    return "\n".join(lines), rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--epochs", type=at_least_one, default=None, help="of each run (10; 30 with --local)")
    parser.add_argument("--seed", type=at_least_one, default=1, help="of the runs by situation")
    parser.add_argument("--local", action="store_true", help="compare numbers of local steps")
    parser.add_argument("--seeds", type=seed_list, default=[1, 2, 3, 4, 5], help="with --local: 1,2,3,…")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows here")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="accuracy over time, as PNG or SVG")


def run(given: argparse.Namespace) -> int:
    check_files(given.json, given.plot)
    if given.plot:
        check_modules("matplotlib")
        if given.local:
            raise BenchError("--plot: there is none with --local")
    with tempfile.TemporaryDirectory() as name:
        if given.local:
            text, plain = local_table(given.seeds, given.epochs or 30, Path(name))
        else:
            rows: list[Row] = []
            for mode in MODES:
                for situation in SITUATIONS:
                    directory = Path(name) / f"{len(rows)}"
                    rows.append(measure(mode, situation, given.epochs or 10, given.seed, directory))
                    print(f"{mode}, {situation}: {rows[-1].seconds:.1f} s", file=sys.stderr, flush=True)
            text, plain = table(rows), [asdict(row) for row in rows]
            if given.plot:
                plot(given.plot, rows)
    print(text)
    if given.json:
        write_atomically(given.json, json.dumps(plain, indent=2) + "\n")
    return Exit.DONE
