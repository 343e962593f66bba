"""gc-paper: measurements of the source papers, repeated, with the papers' numbers beside ours.

NAME is a table or figure, such as 001-table1, 000-table3.4 or 002-figure8; a paper, such as 001; a
measurement, such as seamgs; or `all`. Without NAME all names are listed. Tables are printed as Markdown;
with --out, pages and pictures (SVG) are also written, those of `all` to papers/docs by default. Data sets
that --data does not name are replaced by digits or made data, and the settings say so.

Measurements on shaped links run real daemons, each in a network namespace of its own behind a link of
--mbit in each direction; this needs root. Except in `target`, workers do not compute these models: they send
gradients of the model's size, and wait in place of the computation. gc-paper first measures how long the
exchange of the uncompressed run takes. It then chooses the wait such that this exchange is the fraction
--shares of computation and exchange together.

On standard error, gc-paper reports where the order of methods differs from the paper's. The heads of the
modules of `gradwire_papers` have the papers' conditions, and their differences from ours.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gradwire import __version__
from gradwire.benchmarks import (
    BenchError,
    amount,
    at_least_one,
    exit_code,
    layer_tables,
    seed_list,
    write_json,
)

from .catalogue import ENTRIES, MEASUREMENTS, PAPERS, entries_of

ALL = "all"
LIST = "list"
PAGES = Path("papers/docs")  # default of --out for `all`
DATA_TASKS = ("cifar10", "cifar100", "mnist", "hyperspectral")


def shares(text: str) -> list[float]:
    """Parse shares such as `0.25,0.5`: numbers above 0 and below 1."""
    found = [amount(part) for part in text.split(",")]
    if not all(0 < share < 1 for share in found):
        raise BenchError(f"expected shares above 0 and below 1, separated by commas, got {text!r}")
    return found


# Arguments of measurements that options replace: metavar, function that reads it, help.
GIVEN: dict[str, tuple[str, Any, str]] = {
    "models": ("NAME,...", layer_tables, "layer tables, as for gc-plan"),
    "shares": (
        "N,...",
        shares,
        "fractions of an uncompressed step that communication takes, one run for each",
    ),
    "workers": ("N", at_least_one, "number of workers"),
    "mbit": ("N", amount, "Mbit/s of each link in each direction; 0 for no limit"),
    "steps": ("N", at_least_one, "number of measured steps"),
    "epochs": ("N", at_least_one, "number of epochs"),
}


def paper_name(text: str) -> str:
    """Parse the name of a table, a figure, a paper or a measurement, `all` or `list`."""
    known = [ALL, LIST, *MEASUREMENTS, *(paper.key for paper in PAPERS), *(entry.name for entry in ENTRIES)]
    if text not in known:
        nearest = difflib.get_close_matches(text, known, 1)
        hint = f" (did you mean {nearest[0]!r}?)" if nearest else ""
        raise BenchError(
            f"expected {ALL}, {LIST}, a measurement such as seamgs, a paper such as 001, or a table or "
            f"figure such as 001-table1; gc-paper {LIST} shows all, got {text!r}{hint}"
        )
    return text


def data_of(text: str) -> tuple[str, str]:
    """Parse `TASK=PATH[,KEY=VALUE...]` into the task's name and its options, such as `data=PATH`."""
    name, equals, rest = text.partition("=")
    if name not in DATA_TASKS or not equals or not rest:
        expected = f"TASK=PATH with one of the tasks {', '.join(DATA_TASKS)}"
        raise BenchError(f"expected {expected}, such as cifar10=/data/cifar10, got {text!r}")
    return name, f"data={rest}"


def parser() -> argparse.ArgumentParser:
    """Return the parser of gc-paper's arguments."""
    made = argparse.ArgumentParser(
        prog="gc-paper", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--version", action="version", version=f"gc-paper {__version__}")
    made.add_argument(
        "paper", type=paper_name, nargs="?", default=LIST, metavar="NAME", help="what to measure"
    )
    text = "small sizes: all measurements take about 17 minutes on two cores"
    made.add_argument("--quick", action="store_true", help=text)
    text = f"files of a data set, which may be given several times ({', '.join(DATA_TASKS)})"
    made.add_argument("--data", type=data_of, action="append", default=[], metavar="TASK=PATH", help=text)
    text = f"folder for pages and pictures (default: {PAGES} for {ALL}, else none)"
    made.add_argument("--out", type=Path, metavar="DIR", help=text)
    made.add_argument(
        "--seeds", type=seed_list, metavar="N,...", default=[1], help="seeds of trained runs (default: 1)"
    )
    for name, (metavar, read, text) in GIVEN.items():
        shown = f"{text} (default: the measurement's own)"
        made.add_argument(f"--{name}", type=read, metavar=metavar, help=shown)
    made.add_argument("--json", type=Path, metavar="FILE", help="file for every record, as JSON")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run gc-paper with arguments `argv`, by default those of the process; return the exit code."""
    given = parser().parse_args(argv)
    return exit_code("gc-paper", lambda: listed() if given.paper == LIST else run(given))


def listed() -> int:
    """Print every name with its title."""
    for paper in PAPERS:
        print(f"{paper.key:<16} {paper.title}")
        for entry in paper.entries:
            print(
                f"  {entry.name:<16} {entry.title}" + (f" (not here: {entry.reason})" if entry.reason else "")
            )
    print(f"measurements     {', '.join(MEASUREMENTS)}")
    return 0


def run(given: argparse.Namespace) -> int:
    """Run the chosen measurements, print them and write pages; return the exit code, 1 if one fails.

    Raises:
        BenchError: a measurement does not have an option that was given.
    """
    from . import measurements, pages
    from .result import Conditions

    entries = entries_of(given.paper)
    wanted = [given.paper] if given.paper in MEASUREMENTS else measurements.measurements_of(entries)
    chosen = {name: value for name in GIVEN if (value := getattr(given, name)) is not None}
    for name in wanted:
        measurements.check(name, chosen)
    conditions = Conditions(quick=given.quick, data=dict(given.data), seeds=given.seeds, given=chosen)
    folder = given.out or (PAGES if given.paper == ALL else None)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    records = {} if folder is None else measurements.read(folder)
    for name in wanted:
        of_it = [entry for entry in entries if entry.measurement == name]
        command = command_of(of_it[0].name if of_it else name, given)
        records[name] = measurements.take(name, command, conditions)
        titles = "; ".join(f"{entry.name}: {entry.title}. Paper: {entry.theirs}" for entry in of_it)
        print(f"{titles or name}\n\n{records[name].shown}", flush=True)
        if folder is not None:  # after each, because a run may be stopped
            measurements.write(folder, records)
            pages.write(folder, records, [name])
    for entry in entries:
        if not entry.measurement:
            print(f"{entry.name}: {entry.title}. Paper: {entry.theirs}. Not here: {entry.reason}")
    write_json(given.json, [asdict(records[name]) for name in wanted])
    return 1 if any(records[name].result is None for name in wanted) else 0


def command_of(name: str, given: argparse.Namespace) -> str:
    """Return the command line that measures an entry as `given` says. Paths of data are left out."""
    parts = ["gc-paper", name, *(["--quick"] if given.quick else [])]
    parts += [f"--data {task}=PATH" for task, _ in given.data]
    parts += [f"--seeds {','.join(map(str, given.seeds))}"] if given.seeds != [1] else []
    for each in GIVEN:
        value: Any = getattr(given, each)
        if value is not None:
            text = f"{value:g}" if isinstance(value, int | float) else ",".join(map(str, value))
            parts.append(f"--{each} {text}")
    return " ".join(parts)
