"""`gc-bench curve`: loss after a fixed number of steps, against the bytes that workers exchange for it.

Real daemons train a task on this machine, once for each composition and seed: local steps, their optimizer,
compressors in both directions. The baselines are AdamW and Muon at several learning rates, each in one worker
whose exchange changes nothing and whose batch is that of all workers together. A composition is compared with
the best rate of each, by the seeds that all rates have. All jobs have the schedule of `low-communication`.

Bytes are counted by the server, with all headers. The initial parameters, which one worker sends and the
others load, are left out. The float32 bytes beside them are those of a job that exchanges every step.

The end of an epoch ends a round early. So a job has as many rounds as come nearest to --steps local steps,
and its float32 bytes count the steps that it really took.

A finished run is kept in the file of --runs with all its options. The next invocation does not repeat it.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any
from urllib.parse import quote, unquote

from torch import nn

from ..common.exits import Exit
from ..common.presets import PRESETS
from ..common.spec import parse_spec
from ..optim.optimizer import parse_optimizer
from ..optim.steps import AdamW
from ..settings import RunSettings
from ..worker.tasks import Task, load
from . import output
from .arguments import BenchError, at_least_one, file_to_write, option
from .estimates import estimate, seed_list
from .jobs import train

_LOW = PRESETS["low-communication"].sets
SCHEDULE, MUON, _ONE_BIT = (str(_LOW[option]) for option in ("schedule", "optimizer", "compressor"))
ADAMW = "adamw:beta2=0.99,weight_decay=0.1"
RATES = {"AdamW": (ADAMW, (0.00075, 0.0015, 0.003, 0.006)), "Muon": (MUON, (0.012, 0.024, 0.048))}
ALONE = "local:steps=8,correction=0,clip=1"  # of one worker: all steps are its own


def _local(steps: int, compressor: str, downlink: str = "auto", **options: Any) -> dict[str, Any]:
    """Return the options of a job as with `low-communication`, but for these."""
    mode = f"local:steps={steps},correction=0,overlay=on,clip=1"
    return {**_LOW, "mode": mode, "compressor": compressor, "downlink": downlink, **options}


_PLAIN = "local:steps=8,correction=0,clip=1"
COMPOSITIONS: Mapping[str, Mapping[str, Any]] = {
    **{f"preset {name}": {**each.sets, "schedule": SCHEDULE} for name, each in PRESETS.items()},
    "8 steps, float32": _local(8, "none", "none"),
    "8 steps, rate 0.012": _local(8, _ONE_BIT, learning_rate=0.012),
    "8 steps, without overlay": _local(8, _ONE_BIT, mode=_PLAIN),
    "8 steps, without decay": _local(8, "1bit:block=4096"),
    "8 steps, decay 0.9": _local(8, "1bit:block=4096,decay=0.9"),
    "8 steps, without blocks": _local(8, "1bit:decay=0.97"),
    "8 steps, 4bit": _local(8, "4bit"),
    "8 steps, topk": _local(8, "topk:ratio=5,values=1bit,decay=0.97", "topk:ratio=4,values=1bit"),
    "8 steps, 4 fragments": _local(
        2, _ONE_BIT, mode="local:steps=2,correction=0,overlay=on,clip=1,fragments=4"
    ),
    "16 steps": _local(16, _ONE_BIT),
    "29 steps": _local(29, _ONE_BIT),
    "8 steps of AdamW": _local(8, _ONE_BIT, optimizer=ADAMW, learning_rate=0.006),
    "8 steps of AdamW, 0.012": _local(8, _ONE_BIT, optimizer=ADAMW, learning_rate=0.012),
    "diloco of Muon": _local(
        30,
        "none",
        "none",
        mode="local:steps=30,correction=0,clip=1,outer=sgd/momentum=0.9/nesterov=on,outer_rate=0.7",
    ),
}


@dataclass(frozen=True, kw_only=True)
class CurveRun:
    """A finished training.

    Attributes:
        name: name of the composition or baseline.
        workers: number of workers that the batch is divided among.
        steps: value of --steps.
        taken: number of steps of each worker.
        options: options of the job, which has one worker for a baseline.
        up, down: counted bytes without the initial parameters, of all workers.
        float32: bytes in one direction of a job of as many workers that exchanges every step as float32.
    """

    name: str
    task: str
    workers: int
    steps: int
    taken: int
    options: Mapping[str, Any]
    loss: float
    up: int
    down: int
    float32: int
    seconds: float

    @property
    def seed(self) -> int:
        """Seed of the job."""
        return int(self.options["seed"])


def baselines() -> dict[str, dict[str, Any]]:
    """Return the options of the baselines by name."""
    return {
        f"{name} alone, {rate:g}": {
            "mode": ALONE,
            "workers": 1,
            "optimizer": optimizer,
            "learning_rate": rate,
            "schedule": SCHEDULE,
            "compressor": "none",
            "downlink": "none",
        }
        for name, (optimizer, rates) in RATES.items()
        for rate in rates
    }


def decayed(task: str) -> Task:
    """Return a built-in task, by its percent-encoded spec, whose parameters of fewer than two dimensions have
    no weight decay, as Muon's rule has it, so that AdamW is no worse off."""
    found = load(unquote(task))

    def groups(network: nn.Module) -> list[dict[str, Any]]:
        vectors = [each for each in network.parameters() if each.dim() < 2]
        return [{"params": vectors, "weight_decay": 0.0}]

    return replace(found, groups=groups)


def settings_of(
    options: Mapping[str, Any], *, task: str, workers: int, batch_size: int, steps: int, seed: int
) -> RunSettings:
    """Return the options of a job with about `steps` steps of each worker.

    Args:
        options: options of the composition or baseline.
        task: spec of the task.
        workers: number of workers; a baseline has one, with the batch of all.
        batch_size: number of samples of each worker in a step.
        steps: number of steps to come near.
    """
    mode = parse_spec("mode", options["mode"])
    each = int(mode.options.get("steps", 1)) if mode.name == "local" else 1
    alone = options.get("workers") == 1
    of_adamw = isinstance(parse_optimizer(options["optimizer"]), AdamW)
    of_task = f"gradwire.benchmarks.curve:decayed:task={quote(task, safe='')}"
    versions = rounds(steps, each, load(task).train_samples, batch_size * workers)
    given: dict[str, Any] = {"workers": workers, **options}
    return RunSettings(
        **given,
        task=of_task if of_adamw else task,
        batch_size=batch_size * workers if alone else batch_size,
        epochs=0,
        max_steps=versions,
        evaluate_every=f"{versions}steps",
        seed=seed,
    )


def rounds(steps: int, each: int, samples: int, together: int) -> int:
    """Return the number of rounds whose steps come nearest to `steps`, at least 1.

    Args:
        steps: number of steps of each worker to come near.
        each: number of steps of a round that no end of an epoch shortens.
        samples: number of samples in an epoch.
        together: number of samples that all workers take in a step.
    """
    of_epoch = math.ceil(samples / together)
    found = taken = 0
    while taken < steps:
        more = min(each, of_epoch - taken % of_epoch)
        if found and taken + more - steps > steps - taken:
            break
        taken, found = taken + more, found + 1
    return found


def measure(name: str, settings: RunSettings, given: argparse.Namespace) -> CurveRun:
    """Train one job to its end, and return its run under this name."""
    model_bytes = 4 * sum(each.numel() for each in load(given.task).model().parameters())
    with tempfile.TemporaryDirectory() as directory:
        result = train(settings, Path(directory))
    if result.validation_loss is None:
        raise BenchError(f"{name}: the job of {settings.task} reported no finite validation loss")
    taken = result.local_steps or result.steps
    return CurveRun(
        name=name,
        task=given.task,
        workers=given.workers,
        steps=given.steps,
        taken=taken,
        options=plain(settings),
        loss=result.validation_loss,
        up=result.wire_bytes_up - model_bytes,
        down=result.wire_bytes_down - (settings.workers - 1) * model_bytes,
        float32=model_bytes * given.workers * taken,
        seconds=result.seconds,
    )


def plain(settings: RunSettings) -> dict[str, Any]:
    """Return the options of a job as values that a JSON file returns unchanged."""
    options: dict[str, Any] = json.loads(json.dumps(asdict(settings)))
    return options


def table(runs: Sequence[CurveRun]) -> str:
    """Return a Markdown table of runs of one task, with losses relative to the best rate of each baseline."""
    by_name: dict[str, list[CurveRun]] = {}
    for each in runs:
        by_name.setdefault(each.name, []).append(each)

    def least(optimizer: str) -> float | None:
        """Return the mean loss of an optimizer's best rate, by the seeds that all of its rates have."""
        by_rate = [found for name, found in by_name.items() if name.startswith(f"{optimizer} alone")]
        if not by_rate:
            return None
        shared = set[int].intersection(*({run.seed for run in found} for found in by_rate))
        found = min(by_rate, key=lambda found: fmean(run.loss for run in found if run.seed in shared))
        return fmean(run.loss for run in found)

    best = {optimizer: least(optimizer) for optimizer in RATES}

    def cells(name: str, found: Sequence[CurveRun]) -> list[object]:
        losses = [run.loss for run in found]
        times = ["–", "–"]
        if name not in baselines():
            times = [
                f"{fmean(run.float32 / sent for run, sent in zip(found, of_all, strict=True)):.0f}"
                for of_all in ([run.up for run in found], [run.down for run in found])
            ]
        against = [
            "–" if base is None else f"{100 * (fmean(losses) / base - 1):+.1f} %" for base in best.values()
        ]
        return [
            name,
            len(found),
            f"{fmean(run.taken for run in found):.0f}",
            f"{estimate(losses)}",
            *times,
            *against,
        ]

    headings = ("", "seeds", "steps", "loss", "up ×", "down ×", *(f"against {name}'s best" for name in RATES))
    return output.table(headings, [cells(*each) for each in by_name.items()])


def read(path: Path) -> list[CurveRun]:
    """Return the finished runs in a file of --runs.

    Raises:
        BenchError: the file is none of this release.
    """
    try:
        return [CurveRun(**each) for each in json.loads(path.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError) as error:
        raise BenchError(f"--runs {path}: no file of this release's runs: {error}; name another") from None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option(parser, "--task", str, "characters", "SPEC", "task to train, which reports a loss")
    option(parser, "--workers", at_least_one, 4, "N", "number of workers")
    option(parser, "--batch-size", at_least_one, 16, "N", "samples of each worker in a step")
    option(parser, "--steps", at_least_one, 1000, "N", "steps of each worker")
    option(parser, "--seeds", seed_list, "1,2,3", "N,...", "seeds of the runs")
    known = (*baselines(), *COMPOSITIONS)
    text = "rows; a wrong name lists all (default: all)"
    parser.add_argument("--only", nargs="+", choices=known, default=known, metavar="NAME", help=text)
    text = "JSON file of finished runs, which are not repeated; others are added"
    parser.add_argument("--runs", type=file_to_write, metavar="FILE", help=text)


def run(given: argparse.Namespace) -> int:
    """Train the missing runs, print the table of all runs of this task and size; return the exit code."""
    known: list[CurveRun] = []
    if given.runs is not None and given.runs.exists():
        known = read(given.runs)
    wanted = {**baselines(), **COMPOSITIONS}
    shown: list[CurveRun] = []
    for seed in given.seeds:
        for name in given.only:
            settings = settings_of(
                wanted[name],
                task=given.task,
                workers=given.workers,
                batch_size=given.batch_size,
                steps=given.steps,
                seed=seed,
            )
            run = next((each for each in known if each.options == plain(settings)), None)
            if run is None:
                run = measure(name, settings, given)
                known.append(run)
                output.say(f"{name}, seed {seed}: loss {run.loss:.4f}, {run.seconds:.0f} s")
                output.write_json(given.runs, [asdict(each) for each in known])
            shown.append(replace(run, name=name))
    shown.sort(key=lambda each: given.only.index(each.name))
    print(table(shown))
    return Exit.DONE
