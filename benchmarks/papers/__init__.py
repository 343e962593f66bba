"""`gc-bench paper`: measurements of the papers, repeated here, with the paper's number beside ours.

NAME is a table or figure, such as 001-table1, 000-table3.4 or 002-figure8; a paper, such as 001; or `all`.
docs/papers/README.md lists all names. Tables are printed as Markdown; with --out, pages and pictures (SVG)
are also written, those of `all` to docs/papers by default. Only --quick, --data, --seeds and --out are for
these names. Data sets that --data does not name are replaced by digits or made data, and the settings say so.

The other names are measurements with options of their own:

seamgs: Seconds of a step: no compression, Rand-K over the whole model, layer by layer, in messages of one
    size, and merged as accuracy allows. Table 1.
target: Seconds until an accuracy is reached, for the same methods and MG-WFBP, by real training on digits.
    Figure 2.
accuracy-seamgs: The same with the CNN on digits, with five seeds: which method is nearest to no compression
    at the same density.
4bit: Speed-ups of 4bit and 2bit over no compression, with four and two workers. Tables 2 and 3.
local: Computing and communicating of a step, and speed-ups, with one and several local steps. Figures 15
    and 16.
compressing: Share of compressing in an iteration. Tables 3.5 and 4.5 of the thesis.

Real daemons, each in a network namespace of its own behind a link of --mbit in each direction; this needs
root. `target` trains a real model and emulates nothing. For the other measurements a model is only its
tensors and its computation is emulated, so long that the exchange of the uncompressed run takes the share
--share of computation and exchange. That exchange is measured first, in the same run. Times of the two kinds
are never combined.

On standard error, the benchmark reports where the order of the methods differs from the paper's. The head of
each file in `benchmarks/papers` has the paper's conditions, and their differences from ours.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from ...common.exits import Exit
from ...common.spec import did_you_mean
from ...planning.models import tensors
from .. import output
from ..arguments import MBIT, BenchError, amount, at_least_one, json_option, option
from ..estimates import seed_list
from ..shaped import Setup
from ..star import check_network
from . import catalogue, compressing, emulated, four_bit, local_steps, seamgs, to_target
from .result import Conditions

Plain = list[dict[str, Any]]  # rows, for JSON


def method_rows(
    given: argparse.Namespace,
    models: Iterable[str],
    measured: Callable[[Setup], Iterable[tuple[list[emulated.MethodRow], list[emulated.Method]]]],
    remark: Callable[[list[emulated.MethodRow]], str] | None = None,
) -> Plain:
    """Measure the methods of a paper on each model, print a table, and return its rows as JSON objects.

    Args:
        given: parsed options of the command.
        models: models to measure if --models is not given.
        measured: function from a setup to the rows and methods, for each share.
        remark: function from the rows of a model to a remark, printed on standard error.
    """
    print(output.table(emulated.HEADINGS, []), flush=True)
    found: list[emulated.MethodRow] = []
    for model in given.models or models:
        of_model: list[emulated.MethodRow] = []
        for rows, methods in measured(setup(given, model)):
            emulated.show(rows, methods)
            of_model += rows
        if remark is not None:
            output.say(remark(of_model))
        found += of_model
    return [asdict(row) for row in found]


def seamgs_rows(given: argparse.Namespace) -> Plain:
    """Measure and print the table of `seamgs`; return its rows as JSON objects."""
    shares = given.share or seamgs.SHARES
    return method_rows(given, seamgs.TABLE_1, partial(seamgs.measured, shares=shares))


def four_bit_rows(given: argparse.Namespace) -> Plain:
    """Measure and print the table of `4bit`; return its rows as JSON objects."""
    nodes = [given.workers] if given.workers else four_bit.NODES
    measured = partial(four_bit.measured, shares=given.share or four_bit.SHARES, nodes=nodes)
    return method_rows(given, [four_bit.MODEL], measured, four_bit.overtaken)


def local_rows(given: argparse.Namespace) -> Plain:
    """Measure and print the table of `local`; return its rows as JSON objects."""
    return method_rows(given, local_steps.TABLE_2, partial(local_steps.measured, shares=given.share))


def compressing_rows(given: argparse.Namespace) -> Plain:
    """Measure and print the table of `compressing`; return its rows as JSON objects."""
    print(output.table(compressing.HEADINGS, []), flush=True)
    found: list[compressing.CompressingRow] = []
    for model in given.models or compressing.TABLE_3_5:
        for share in given.share or [compressing.SHARE]:
            for row in compressing.measured(setup(given, model), share, compressing.RATIO):
                print(output.row(compressing.cells(row)), flush=True)
                found.append(row)
    return [asdict(row) | {"share": row.share} for row in found]


def target_rows(given: argparse.Namespace) -> Plain:
    """Measure and print the table of `target`; return its rows as JSON objects.

    Raises:
        BenchError: if --models or --share is given.
    """
    return trained_rows(given, "digits", given.seeds or [1])


def accuracy_rows(given: argparse.Namespace) -> Plain:
    """Measure and print the table of `accuracy-seamgs`; return its rows as JSON objects.

    Raises:
        BenchError: if --models or --share is given.
    """
    return trained_rows(given, "digits:model=cnn", given.seeds or [1, 2, 3, 4, 5])


def trained_rows(given: argparse.Namespace, task: str, seeds: Sequence[int]) -> Plain:
    """Train a task with all methods, and print the table; return its rows as JSON objects.

    Raises:
        BenchError: if --models or --share is given.
    """
    if given.models or given.share:
        raise BenchError(
            f"{given.paper}: trains digits without emulated computation; leave out --models and --share"
        )
    print(output.table(to_target.HEADINGS, []), flush=True)
    found: list[to_target.TargetRow] = []
    workers = given.workers or WORKERS
    for row, method in to_target.measured(
        task=task, seeds=seeds, workers=workers, epochs=given.epochs, mbit=given.mbit
    ):
        print(output.row(to_target.cells(row, method)), flush=True)
        found.append(row)
    return [asdict(row) for row in found]


WORKERS = 4
PAPERS: dict[str, Callable[[argparse.Namespace], Plain]] = {
    "seamgs": seamgs_rows,
    "target": target_rows,
    "accuracy-seamgs": accuracy_rows,
    "4bit": four_bit_rows,
    "local": local_rows,
    "compressing": compressing_rows,
}


ALL = "all"
PAGES = Path("docs/papers")  # default of --out for `all`
DATA_TASKS = ("cifar10", "cifar100", "mnist", "hyperspectral")


def setup(given: argparse.Namespace, model: str) -> Setup:
    """Return the setup for a model: links, workers and steps, as the options say."""
    return Setup(model=model, workers=given.workers or WORKERS, mbit=given.mbit, steps=given.steps)


def names(text: str) -> list[str]:
    """Parse names of models, separated by commas."""
    found = text.split(",")
    for name in found:
        try:
            tensors(name)
        except ValueError as error:
            raise BenchError(str(error)) from None
    return found


def paper_name(text: str) -> str:
    """Parse the name of a measurement, a table, a figure or a paper, or `all`."""
    known = (ALL, *PAPERS, *(paper.key for paper in catalogue.PAPERS), *catalogue.BY_NAME)
    if text not in known:
        few = f"{ALL}, {', '.join(PAPERS)}, a paper such as 001, or a table or figure such as 001-table1"
        raise BenchError(
            f"expected {few}; docs/papers/README.md lists all, got {text!r}{did_you_mean(text, known)}"
        )
    return text


def data_of(text: str) -> tuple[str, str]:
    """Parse `TASK=PATH[,KEY=VALUE...]` and return the task's name and its options, such as `data=PATH`."""
    name, equals, rest = text.partition("=")
    if name not in DATA_TASKS or not equals or not rest:
        expected = f"TASK=PATH with one of the tasks {', '.join(DATA_TASKS)}"
        raise BenchError(f"expected {expected}, such as cifar10=/data/cifar10, got {text!r}")
    return name, f"data={rest}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = f"{', '.join(PAPERS)}; or a table or figure, such as 001-table1; or a paper, such as 001; or {ALL}"
    parser.add_argument("paper", type=paper_name, metavar="NAME", help=f"measurement: {text}")
    text = "small sizes: all measurements take about 17 minutes on two cores"
    parser.add_argument("--quick", action="store_true", help=f"tables and figures: {text}")
    text = "tables and figures: files of a data set, which may be given several times"
    parser.add_argument(
        "--data",
        type=data_of,
        action="append",
        default=[],
        metavar="TASK=PATH",
        help=f"{text} ({', '.join(DATA_TASKS)})",
    )
    text = f"tables and figures: folder for pages and pictures (default: {PAGES} for {ALL}, else none)"
    parser.add_argument("--out", type=Path, metavar="DIR", help=text)
    text = "layer tables, as for gc-bench step (default: those of the paper)"
    parser.add_argument("--models", type=names, metavar="NAME,...", help=text)
    text = (
        "fractions of an uncompressed step that communication takes, one run for each (default: those in the "
        "paper's figures, or 0.5)"
    )
    parser.add_argument("--share", type=emulated.shares, metavar="N,...", help=text)
    text = "number of workers (default: that of the paper, 4; 4 and 2 for 4bit)"
    parser.add_argument("--workers", type=at_least_one, metavar="N", help=text)
    option(parser, "--mbit", amount, 1000.0, "N", MBIT)
    option(parser, "--steps", at_least_one, 12, "N", "number of measured steps")
    option(parser, "--epochs", at_least_one, 30, "N", "epochs of target and accuracy-seamgs")
    text = "seeds of target, tables and figures (default: 1), and of accuracy-seamgs (default: 1,2,3,4,5)"
    parser.add_argument("--seeds", type=seed_list, metavar="N,...", help=text)
    json_option(parser)


def run(given: argparse.Namespace) -> int:
    """Measure and print the chosen rows; return the exit code, 1 if a table or figure fails."""
    if given.paper not in PAPERS:
        return run_entries(given)
    if given.quick or given.data or given.out:
        raise BenchError(
            f"{given.paper}: --quick, --data and --out are for tables and figures, such as 001-table1"
        )
    check_network()
    output.write_json(given.json, PAPERS[given.paper](given))
    return Exit.DONE


def run_entries(given: argparse.Namespace) -> int:
    """Measure the chosen tables and figures, print them, and write pages; return the exit code.

    Raises:
        BenchError: if an option of the other measurements is given.
    """
    from . import pages, repeats

    if given.models or given.share or given.workers:
        raise BenchError(f"{given.paper}: --models, --share and --workers are for {', '.join(PAPERS)}")
    entries = chosen(given.paper)
    data = dict(given.data)
    conditions = Conditions(quick=given.quick, data=data, seeds=given.seeds or [1])
    folder = given.out or (PAGES if given.paper == ALL else None)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    records = {} if folder is None else repeats.read(folder)
    wanted = repeats.measurements_of(entries)
    for name in wanted:
        of_it = [entry for entry in entries if entry.measurement == name]
        records[name] = repeats.take(name, command_of(of_it[0].name, given), conditions)
        titles = "; ".join(f"{entry.name}: {entry.title}. Paper: {entry.theirs}" for entry in of_it)
        print(f"{titles}\n\n{repeats.shown(records[name], of_it)}", flush=True)
        if folder is not None:  # after each, because a run may be stopped
            repeats.write(folder, records)
            pages.write(folder, records, [name])
    for entry in entries:
        if not entry.measurement:
            print(f"{entry.name}: {entry.title}. Paper: {entry.theirs}. Not here: {entry.reason}")
    output.write_json(given.json, [asdict(records[name]) for name in wanted])
    return 1 if any(records[name].result is None for name in wanted) else Exit.DONE


def chosen(name: str) -> list[catalogue.Entry]:
    """Return the entries that a name selects: one, those of a paper, or all."""
    if name in catalogue.BY_NAME:
        return [catalogue.BY_NAME[name]]
    return [entry for entry in catalogue.ENTRIES if name in (ALL, entry.paper)]


def command_of(name: str, given: argparse.Namespace) -> str:
    """Return the command line that measures an entry as `given` says. Paths of data are left out."""
    parts = ["gc-bench paper", name, *(["--quick"] if given.quick else [])]
    parts += [f"--data {task}=PATH" for task, _ in given.data]
    parts += [f"--seeds {','.join(map(str, given.seeds))}"] if given.seeds not in (None, [1]) else []
    return " ".join(parts)
