"""The functions that measure, by name, and the records of their results.

Several entries of the catalogue may share a measurement, which then runs once. papers/docs/results.json holds
the records, from which `pages` writes the pages. So one measurement can run again without the others.
"""

from __future__ import annotations

import datetime
import inspect
import json
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gradwire.benchmarks import BenchError, RunError, say, table

from . import coded, compressing, four_bit, gradients, local_steps, seamgs, target, trainings
from .catalogue import MEASUREMENTS, Entry
from .result import Conditions, Panel, Result

RESULTS = "results.json"
FUNCTIONS: Mapping[str, Callable[..., Result]] = {
    "sizes": gradients.sizes,
    "thresholds": gradients.thresholds,
    "distribution": gradients.distribution,
    "centroid": gradients.centroid,
    "layers": gradients.layers,
    "accuracies": trainings.accuracies,
    "detection": trainings.detection,
    "one_machine": trainings.one_machine,
    "modes": trainings.modes,
    "seamgs": seamgs.measured,
    "target": target.measured,
    "four_bit": four_bit.measured,
    "local_steps": local_steps.measured,
    "compressing": compressing.measured,
    "coded_bytes": coded.exchanged,
    "redundancy": coded.redundancies,
    "coded_times": coded.times,
}


@dataclass(frozen=True, kw_only=True)
class Record:
    """A finished measurement.

    Attributes:
        measurement: its name in the catalogue.
        date: day on which it ran, such as 2026-01-31.
        command: command line that repeats it.
        quick: True if sizes were small.
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

    @property
    def shown(self) -> str:
        """Markdown of the record: settings, command and table."""
        if self.result is None:
            return f"Not run on {self.date}: {self.failure}\n"
        of = MEASUREMENTS[self.measurement]
        lines = [
            f"Settings: {self.result.settings}." + (" Small sizes (`--quick`)." if self.quick else ""),
            *([f"Differs from the paper: {of.differs}."] if of.differs else []),
            f"`{self.command}`, {self.date}, {self.seconds:.0f} s.",
        ]
        return "\n".join(lines) + "\n\n" + table(self.result.headings, self.result.rows) + "\n"


def check(name: str, given: Collection[str]) -> None:
    """Raise BenchError if a measurement does not take an argument that the user has given."""
    function = FUNCTIONS[MEASUREMENTS[name].by]
    if unknown := set(given) - set(inspect.signature(function).parameters):
        raise BenchError(f"{name}: leave out --{sorted(unknown)[0]}, which this measurement does not have")


def take(name: str, command: str, conditions: Conditions) -> Record:
    """Run one measurement and return its record, also if it cannot run on this machine.

    Args:
        name: name of the measurement.
        command: command line that repeats it.
        conditions: conditions of the measurement.
    """
    started = time.monotonic()
    of, result, failure = MEASUREMENTS[name], None, ""
    options = {**of.options, **(of.quick if conditions.quick else {}), **conditions.given}
    try:
        result = FUNCTIONS[of.by](conditions, **options)
    except (BenchError, RunError) as error:
        failure = str(error)
        say(f"{name}: {failure}")
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
        BenchError: the file of records cannot be read.
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
    """Write the records to the folder, in the order of the catalogue."""
    plain = {name: asdict(records[name]) for name in MEASUREMENTS if name in records}
    text = json.dumps(plain, indent=1, ensure_ascii=False, allow_nan=False)
    replace_text(folder / RESULTS, text + "\n")


def replace_text(path: Path, text: str) -> None:
    """Write a file whose previous content stays until the new one is whole."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


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
