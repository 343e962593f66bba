"""`gc-bench accuracy`: every compressor at 10 x and at 100 x on digits, over several seeds.

Trained by `simulation`, with the MLP and the CNN. Beside each compressor stands a control: Top-K with the
ratio at which it sends as many bytes. Differences are taken between runs with the same seed, which share the
initial parameters and sample order.

dgc and krngc correct momentum at the worker, which makes steps larger: their peer is an uncompressed run with
the same momentum at the server, and they are shown against plain SGD too, which is what the claims are about.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

from ..compressors import check_downlink, create
from ..deploy.report import write_atomically
from ..exits import Exit
from . import output
from .accuracy import Estimate, estimate, seed_list
from .arguments import at_least_one, check_module, file_to_write, some_of
from .simulation import Run, train

# The cheapest control is still Top-K: with fewer bytes than its biases take there is none.
CONTROL_RATIOS = (1.0, 1e5)
# What is claimed is claimed after so many.
CLAIMED_EPOCHS = 30


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One row. within: largest loss of accuracy against `none` that we claim, on either model.
    below: accuracy that it is claimed not to reach."""

    compressor: str
    optimizer: str = "sgd"
    within: float | None = None
    below: float | None = None

    @property
    def name(self) -> str:
        return self.compressor if self.optimizer == "sgd" else f"{self.compressor} ({self.optimizer})"


EVERY_ELEMENT = (
    *("bf16", "fp16", "8bit", "qsgd:bits=8", "4bit", "qsgd", "2bit", "terngrad"),
    *("qsgd:bits=2", "1bit", "signsgd", "threshold"),
)
SOME_ELEMENTS = (  # at each ratio
    "topk:ratio={}",
    "gcac:ratio={}",
    "krngc:ratio={}",
    "krngc:ratio={},delay=3",
    "krngc:ratio={},momentum=0,warmup=0",
    "krngc:ratio={},momentum=0,warmup=0,reading=literal",
    "dgc:ratio={}",
    "randk:ratio={}",
    "l1:ratio={}",
    "topk:ratio={},values=4bit",
)
WITHIN = {
    **dict.fromkeys(("4bit", "topk:ratio=10", "gcac:ratio=10", "krngc:ratio=10", "dgc:ratio=10"), 0.01),
    **dict.fromkeys(("krngc:ratio=100", "dgc:ratio=100"), 0.02),
}
BELOW = {f"krngc:ratio={ratio},momentum=0,warmup=0,reading=literal": 0.5 for ratio in (10, 100)}
COMPRESSORS = (
    *EVERY_ELEMENT,
    *(spec.format(ratio) for ratio in (10, 100) for spec in SOME_ELEMENTS),
    "topk:ratio=100,values=1bit",
)

BASELINE = Setup(compressor="none")
SETUPS = (
    BASELINE,
    Setup(compressor="none", optimizer="sgd:momentum=0.9"),
    *(Setup(compressor=spec, within=WITHIN.get(spec), below=BELOW.get(spec)) for spec in COMPRESSORS),
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One setup on one model; a run per seed. control: Top-K with as many bytes, where there is one."""

    setup: Setup
    runs: Sequence[Run]
    baseline: Sequence[Run]
    control: str | None
    control_runs: Sequence[Run]

    @property
    def accuracy(self) -> Estimate:
        return estimate([run.accuracies[-1] for run in self.runs])

    @property
    def difference(self) -> Estimate:
        """To the uncompressed run of the same seed."""
        pairs = zip(self.runs, self.baseline, strict=True)
        return estimate([run.accuracies[-1] - base.accuracies[-1] for run, base in pairs])

    @property
    def broken_claim(self) -> str | None:
        """What we claim of it and does not hold."""
        within, below = self.setup.within, self.setup.below
        if within is not None and self.difference.mean < -within:
            return f"{self.setup.name}: {self.difference} against none, claimed within {within}"
        if below is not None and self.accuracy.mean >= below:
            return f"{self.setup.name}: reaches {self.accuracy}, claimed to stay below {below}"
        return None


def control_of(bytes_up: int, probe: Run, probe_ratio: float, fixed_bytes: int) -> float | None:
    """The ratio at which Top-K should send `bytes_up`, from a probe; None if there is none.

    What it sends besides `fixed_bytes`, for the small tensors, is about inversely proportional to the ratio.
    """
    if bytes_up <= fixed_bytes:
        return None
    low, high = CONTROL_RATIOS
    ratio = probe_ratio * (probe.wire_bytes - fixed_bytes) / (bytes_up - fixed_bytes)
    return min(max(ratio, low), high)


def _train(job: tuple[str, str, str, int, int, str]) -> Run:
    """In a process of its own: model, compressor, optimizer, seed, epochs, downlink."""
    import torch

    from ..compressors import set_threads
    from ..worker.tasks.digits import digits

    torch.set_num_threads(1)
    set_threads(1)
    model, compressor, optimizer, seed, epochs, downlink = job
    task = digits("cnn" if model == "cnn" else "mlp")
    return train(task, compressor, seed=seed, epochs=epochs, optimizer=optimizer, downlink=downlink)


class Bench:
    """Runs what is asked for, each once, several at a time."""

    def __init__(self, seeds: Sequence[int], epochs: int, jobs: int, downlink: str) -> None:
        self._seeds, self._epochs, self._downlink = seeds, epochs, downlink
        # Spawned, because torch's threads do not survive a fork.
        self._pool = ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"))
        self._runs: dict[tuple[str, str, str], list[Run]] = {}

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def run(self, model: str, compressor: str, optimizer: str = "sgd") -> list[Run]:
        """One per seed; says on standard error how far it is."""
        key = model, compressor, optimizer
        if key not in self._runs:
            jobs = [(*key, seed, self._epochs, self._downlink) for seed in self._seeds]
            self._runs[key] = list(self._pool.map(_train, jobs))
            last = statistics.fmean(run.accuracies[-1] for run in self._runs[key])
            first = self._runs[key][0]
            ratios = f"{first.ratio:.1f} x up, {first.down_ratio:.1f} x down"
            output.say(f"{model}, {compressor}, {optimizer}: {last:.4f} at {ratios}")
        return self._runs[key]

    def row(self, model: str, setup: Setup) -> Row:
        """A setup with its baseline and its control."""
        runs = self.run(model, setup.compressor, setup.optimizer)
        baseline = self.run(model, BASELINE.compressor, BASELINE.optimizer)
        control = None
        if setup.compressor != "none" and not setup.compressor.startswith("topk"):
            control = self._control(model, runs[0].wire_bytes)
        control_runs = self.run(model, control) if control is not None else []
        return Row(setup=setup, runs=runs, baseline=baseline, control=control, control_runs=control_runs)

    def _control(self, model: str, bytes_up: int) -> str | None:
        """Top-K that sends about as many bytes. Two probes: an index takes longer where fewer are kept."""
        ratio = 100.0
        # At ratio 1e5 next to nothing is kept but the small tensors.
        fixed = self.run(model, f"topk:ratio={CONTROL_RATIOS[1]:g}")[0].wire_bytes
        for _ in range(2):
            probe = self.run(model, f"topk:ratio={ratio:g}")[0]
            found = control_of(bytes_up, probe, ratio, fixed)
            if found is None or found == CONTROL_RATIOS[0]:
                return None
            ratio = float(f"{found:.3g}")
        return f"topk:ratio={ratio:g}"


def markdown(model: str, rows: Sequence[Row], given: argparse.Namespace) -> str:
    """The table of one model."""

    def cells(row: Row) -> Iterable[object]:
        yield from (f"`{row.setup.name}`", row.accuracy)
        sign = "+" if row.difference.mean >= 0 else ""
        yield from (f"{sign}{row.difference}", f"1/{row.runs[0].ratio:.1f}")
        yield f"1/{row.runs[0].down_ratio:.1f}"
        if row.control is None:
            yield from ("–", "–", "–")
        else:
            yield from (f"`{row.control}`", f"1/{row.control_runs[0].ratio:.1f}")
            yield estimate([run.accuracies[-1] for run in row.control_runs])

    what = f"`digits:model={model}`, `--downlink {given.downlink}`, {given.epochs} epochs, "
    what += f"seeds {', '.join(map(str, given.seeds))}; "
    headings = (
        "compressor",
        "accuracy",
        "against `none`",
        "bytes up",
        "bytes down",
        "equal-bytes Top-K",
        "bytes",
        "accuracy",
    )
    text = f"{what}mean ± half-width of the 95 % interval.\n\n"
    return f"{text}{output.table(headings, map(cells, rows))}\n"


def plain(model: str, row: Row, downlink: str) -> Mapping[str, Any]:
    """A row as JSON."""
    return {
        "model": model,
        "downlink": downlink,
        "compressor": row.setup.compressor,
        "optimizer": row.setup.optimizer,
        "accuracies": [list(run.accuracies) for run in row.runs],
        "wire_bytes": [run.wire_bytes for run in row.runs],
        "down_bytes": [run.down_bytes for run in row.runs],
        "raw_bytes": [run.raw_bytes for run in row.runs],
        "control": row.control,
        "control_accuracies": [list(run.accuracies) for run in row.control_runs],
        "control_wire_bytes": [run.wire_bytes for run in row.control_runs],
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shown = "(default: %(default)s)"
    parser.add_argument("--seeds", type=seed_list, default="1,2,3,4,5", metavar="N,...", help=shown)
    text = "of each run; the claims are checked from %(default)s, the default, on"
    parser.add_argument("--epochs", type=at_least_one, default=CLAIMED_EPOCHS, help=text)
    models = some_of(["mlp", "cnn"])
    parser.add_argument("--models", type=models, default="mlp,cnn", metavar="NAME,...", help=shown)
    text = "only these, with plain SGD (default: all)"
    parser.add_argument("--compressors", nargs="+", metavar="SPEC", help=text)
    parser.add_argument("--downlink", default="auto", metavar="SPEC", help=f"of the updates {shown}")
    parser.add_argument("--jobs", type=at_least_one, default=2, help="runs at a time (default: %(default)s)")
    parser.add_argument("--json", type=file_to_write, metavar="FILE", help="every run")
    parser.add_argument("--markdown", type=file_to_write, metavar="FILE", help="what is printed")


def run(given: argparse.Namespace) -> int:
    """Returns 1 when a claim does not hold."""
    check_module("sklearn")
    check_downlink(given.downlink)
    for spec in given.compressors or ():
        create(spec)
    setups: Sequence[Setup] = SETUPS
    if given.compressors:
        setups = [Setup(compressor=spec) for spec in given.compressors]
    texts: list[str] = []
    reports: list[Mapping[str, Any]] = []
    broken: list[str] = []
    with Bench(given.seeds, given.epochs, given.jobs, given.downlink) as bench:
        for model in given.models:
            rows = [bench.row(model, setup) for setup in setups]
            texts.append(markdown(model, rows, given))
            reports += [plain(model, row, given.downlink) for row in rows]
            if given.epochs >= CLAIMED_EPOCHS:
                broken += [f"{model}: {row.broken_claim}" for row in rows if row.broken_claim is not None]
    text = "\n".join(texts)
    print(text)
    for claim in broken:
        print(f"does not hold: {claim}")
    if given.markdown is not None:
        write_atomically(given.markdown, text)
    output.write_json(given.json, reports)
    return 1 if broken else Exit.DONE
