"""`gc-bench paper`: measurements of the papers, repeated here, with the paper's number beside ours.

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
from typing import Any

from ...common.exits import Exit
from ...planning.models import tensors
from .. import output
from ..arguments import MBIT, BenchError, amount, at_least_one, json_option, option
from ..estimates import seed_list
from ..shaped import Setup
from ..star import check_network
from . import compressing, emulated, four_bit, local_steps, seamgs, to_target

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paper", choices=PAPERS, metavar="NAME", help=f"measurement: {', '.join(PAPERS)}")
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
    text = "seeds of target and accuracy-seamgs (default: 1, and 1,2,3,4,5)"
    parser.add_argument("--seeds", type=seed_list, metavar="N,...", help=text)
    json_option(parser)


def run(given: argparse.Namespace) -> int:
    """Measure and print the chosen table; return the exit code."""
    check_network()
    output.write_json(given.json, PAPERS[given.paper](given))
    return Exit.DONE
