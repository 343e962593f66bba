"""`gc-bench paper`: what the papers measured, measured here, with the paper's number beside ours.

seamgs       Seconds of a step: no compression, Rand-K over the whole model, layer by layer, in messages of
             one size, and merged as accuracy allows. Table 1.
target       Seconds until an accuracy is reached, for the same five, by real training on digits. Figure 2.
4bit         Speed-ups of 4bit and 2bit over no compression, with four and two workers. Tables 2 and 3.
local        Computing and communicating of a step, and speed-ups, with one and several local steps. Figures
             15 and 16.
compressing  Share of compressing in an iteration. Tables 3.5 and 4.5 of the thesis.

Real daemons, each in a network namespace of its own behind a link of --mbit in each direction; this needs
root. But for `target` a model is its tensors and its computation is emulated: so long that the exchange of
the uncompressed run takes the share --share of computation and exchange. That exchange is measured first, in
the same run. `target` emulates nothing: times of the two kinds are never put together.

The order of the ways to train is compared with the paper's, on standard error. The head of each file in
`benchmarks/papers` has the paper's conditions, and how ours differ.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
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
    """Measure and print the ways to train on each model. remark: on the rows of a model."""
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
    shares = given.share or seamgs.SHARES
    return method_rows(given, seamgs.TABLE_1, partial(seamgs.measured, shares=shares))


def four_bit_rows(given: argparse.Namespace) -> Plain:
    nodes = [given.workers] if given.workers else four_bit.NODES
    measured = partial(four_bit.measured, shares=given.share or four_bit.SHARES, nodes=nodes)
    return method_rows(given, [four_bit.MODEL], measured, four_bit.overtaken)


def local_rows(given: argparse.Namespace) -> Plain:
    return method_rows(given, local_steps.TABLE_2, partial(local_steps.measured, shares=given.share))


def compressing_rows(given: argparse.Namespace) -> Plain:
    print(output.table(compressing.HEADINGS, []), flush=True)
    found: list[compressing.CompressingRow] = []
    for model in given.models or compressing.TABLE_3_5:
        for share in given.share or [compressing.SHARE]:
            for row in compressing.measured(setup(given, model), share, compressing.RATIO):
                print(output.row(compressing.cells(row)), flush=True)
                found.append(row)
    return [asdict(row) | {"share": row.share} for row in found]


def target_rows(given: argparse.Namespace) -> Plain:
    if given.models or given.share:
        raise BenchError(
            "target: trains digits, with the computation that it has: give no --models, no --share"
        )
    print(output.table(to_target.HEADINGS, []), flush=True)
    found: list[to_target.TargetRow] = []
    workers = given.workers or WORKERS
    for row, method in to_target.measured(
        seeds=given.seeds, workers=workers, epochs=given.epochs, mbit=given.mbit
    ):
        print(output.row(to_target.cells(row, method)), flush=True)
        found.append(row)
    return [asdict(row) for row in found]


WORKERS = 4
PAPERS: dict[str, Callable[[argparse.Namespace], Plain]] = {
    "seamgs": seamgs_rows,
    "target": target_rows,
    "4bit": four_bit_rows,
    "local": local_rows,
    "compressing": compressing_rows,
}


def setup(given: argparse.Namespace, model: str) -> Setup:
    return Setup(model=model, workers=given.workers or WORKERS, mbit=given.mbit, steps=given.steps)


def names(text: str) -> list[str]:
    """Read layer tables, separated by commas."""
    found = text.split(",")
    for name in found:
        try:
            tensors(name)
        except ValueError as error:
            raise BenchError(str(error)) from None
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paper", choices=PAPERS, metavar="NAME", help=f"measurement: {', '.join(PAPERS)}")
    text = "layer tables, as of gc-bench step (default: those of the paper)"
    parser.add_argument("--models", type=names, metavar="NAME,...", help=text)
    text = (
        "shares of communication in an uncompressed step, one run for each (default: as the paper's figures "
        "have it, or 0.5)"
    )
    parser.add_argument("--share", type=emulated.shares, metavar="N,...", help=text)
    text = "workers (default: those of the paper, 4; 4 and 2 for 4bit)"
    parser.add_argument("--workers", type=at_least_one, metavar="N", help=text)
    option(parser, "--mbit", amount, 1000.0, "N", MBIT)
    option(parser, "--steps", at_least_one, 12, "N", "steps to count")
    option(parser, "--epochs", at_least_one, 30, "N", "epochs of target")
    option(parser, "--seeds", seed_list, "1", "N,...", "seeds of target")
    json_option(parser)


def run(given: argparse.Namespace) -> int:
    check_network()
    output.write_json(given.json, PAPERS[given.paper](given))
    return Exit.DONE
