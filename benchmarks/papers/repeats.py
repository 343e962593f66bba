"""The measurements that repeat the papers' tables and figures, by name, and the record of their results.

A catalogue entry names its measurement. Several entries may share one, which then runs once. `Record` is a
line of docs/papers/results.json, from which `pages` writes the pages, so that one entry can be measured again
without the others.
"""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ...deploy.processes import RunError
from ...deploy.report import write_atomically
from .. import output
from ..arguments import BenchError
from . import gradients, links, trainings
from .catalogue import Entry
from .result import Conditions, Panel, Result

RESULTS = "results.json"
MEASUREMENTS: Mapping[str, Callable[[Conditions], Result]] = {
    "sizes": gradients.sizes,
    "thresholds": gradients.thresholds,
    "distribution": gradients.distribution,
    "centroid": gradients.centroid,
    "gradients": partial(gradients.by_layer, model="inception"),
    "gradients-110": partial(gradients.by_layer, model="resnet110"),
    "detection": trainings.detection,
    "thesis-accuracy": trainings.thesis,
    "krngc-accuracy": trainings.k_reciprocal,
    "warm-up": trainings.warm_up,
    "groups": trainings.groups,
    "curves-4": partial(trainings.strategies, workers=4),
    "curves-2": partial(trainings.strategies, workers=2),
    "curves-100": partial(trainings.strategies_on_images, name="cifar100", model="resnet20"),
    "curves-resnet": partial(trainings.strategies_on_images, name="cifar10", model="resnet110"),
    "one-machine": trainings.one_machine,
    "coded-mlp": partial(trainings.coded, network="mlp"),
    "coded-cnn": partial(trainings.coded, network="cnn"),
    "multi-step": partial(trainings.local_steps, theirs=trainings.TABLE_2_OF_004),
    "intervals": partial(trainings.local_steps, theirs=trainings.TABLE_3_OF_004),
    "seamgs": links.sparse_fusion,
    "target": links.to_accuracies,
    "4bit": links.speedups_of_4bit,
    "local": links.local,
    "compressing": links.shares_of_compressing,
    "coded-bytes": links.coded_bytes,
    "redundancy": links.redundancies,
    "coded-time": links.coded_times,
}


@dataclass(frozen=True, kw_only=True)
class Record:
    """A finished measurement.

    Attributes:
        measurement: its name in `MEASUREMENTS`.
        date: day on which it ran, such as 2026-01-31.
        command: command line that repeats it.
        quick: whether sizes were small.
        seconds: duration.
        result: its result; None if it failed.
        failure: reason of the failure; "" if there is a result.
    """

    measurement: str
    date: str
    command: str
    quick: bool
    seconds: float
    result: Result | None
    failure: str = ""


def take(name: str, command: str, conditions: Conditions) -> Record:
    """Run one measurement and return its record, also if it cannot run on this machine.

    Args:
        name: name of the measurement.
        command: command line that repeats it.
        conditions: conditions of the measurement.
    """
    started = time.monotonic()
    result, failure = None, ""
    try:
        result = MEASUREMENTS[name](conditions)
    except (BenchError, RunError) as error:
        failure = str(error)
        output.say(f"{name}: {failure}")
    return Record(
        measurement=name,
        date=datetime.date.today().isoformat(),
        command=command,
        quick=conditions.quick,
        seconds=round(time.monotonic() - started, 1),
        result=result,
        failure=failure,
    )


def measurements_of(entries: Iterable[Entry]) -> list[str]:
    """Return the names of the measurements that the entries need, each once."""
    return list(dict.fromkeys(entry.measurement for entry in entries if entry.measurement))


def read(folder: Path) -> dict[str, Record]:
    """Return the records in a folder by measurement; empty if there are none.

    Raises:
        BenchError: if the file of records cannot be read.
    """
    path = folder / RESULTS
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
        return {name: _record(each) for name, each in plain.items()}
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError) as error:
        raise BenchError(f"{path}: not a file of results ({error}); remove it") from None


def write(folder: Path, records: Mapping[str, Record]) -> None:
    """Write the records to the folder, in the order of `MEASUREMENTS`."""
    plain = {name: asdict(records[name]) for name in MEASUREMENTS if name in records}
    text = json.dumps(plain, indent=1, ensure_ascii=False, allow_nan=False)
    write_atomically(folder / RESULTS, text + "\n")


def _record(plain: Mapping[str, Any]) -> Record:
    found: dict[str, Any] = dict(plain)
    if found["result"] is not None:
        result: dict[str, Any] = dict(found["result"])
        panels: list[dict[str, Any]] = result["panels"]
        for panel in panels:
            panel["lines"] = {name: tuple(line) for name, line in panel["lines"].items()}
        result["panels"] = [Panel(**panel) for panel in panels]
        found["result"] = Result(**result)
    return Record(**found)


def shown(record: Record, entries: Sequence[Entry]) -> str:
    """Return Markdown of one record: settings, command and table.

    Args:
        record: the measurement.
        entries: entries of the catalogue that it repeats.
    """
    if record.result is None:
        return f"Not run on {record.date}: {record.failure}\n"
    result = record.result
    differs = "; ".join(dict.fromkeys(entry.differs for entry in entries if entry.differs))
    lines = [
        f"Settings: {result.settings}." + (" Small sizes (`--quick`)." if record.quick else ""),
        *([f"Differs from the paper: {differs}."] if differs else []),
        f"`{record.command}`, {record.date}, {record.seconds:.0f} s.",
    ]
    return "\n".join(lines) + "\n\n" + output.table(result.headings, result.rows) + "\n"
