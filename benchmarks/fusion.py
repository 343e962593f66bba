"""`gc-bench fusion`: how near the papers' greedy rules of merging come to the best that there is.

Random models of 2 to --layers layers, whose link takes about as long as their computation. MG-WFBP's rule
looks one layer ahead; SEAMGS's, too, among merges that do not raise the sparse error. Each is compared with
the best division of the same model, which `planning.fusion.fastest` finds: by how much later the last message
is through. The tests hold `fastest` against trying every division.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from ..exits import Exit
from ..planning import Layer, Link, fastest, mg_wfbp, seamgs, sent
from ..planning.fusion import Group, keeps_accuracy
from . import output
from .arguments import at_least_one, file_to_write


@dataclass(frozen=True, kw_only=True)
class Row:
    """not_best: share of the models in which the rule is more than a rounding error from the best. The rest
    are how many times as late the last message is: in the median, the 99th percentile, at most."""

    rule: str
    not_best: float
    median: float
    percentile_99: float
    largest: float


HEADINGS = ("rule", "not the best", "median", "99 %", "at most")


def model(chance: random.Random, most: int) -> tuple[list[Layer], Link]:
    """most: layers."""
    layers = list[Layer]()
    for _ in range(chance.randint(2, most)):
        elements = chance.randint(100, 100_000)
        kept = max(1, int(elements * chance.uniform(0.001, 0.02)))
        layers.append(
            Layer(
                elements=elements,
                kept=kept,
                sent_bytes=4 * kept,
                backward_s=chance.expovariate(1),
                square_norm=elements * chance.expovariate(1),
            )
        )
    total = sum(layer.sent_bytes for layer in layers)
    start_s, times = chance.choice([0.03, 0.1, 0.3, 1.0]), chance.choice([0.3, 1.0, 3.0])
    return layers, Link(start_s=start_s, byte_s=times * len(layers) / total)


def summary(rule: str, ratios: Sequence[float]) -> Row:
    ordered = sorted(ratios)
    return Row(
        rule=rule,
        not_best=sum(ratio > 1 + 1e-9 for ratio in ordered) / len(ordered),
        median=ordered[len(ordered) // 2],
        percentile_99=ordered[int(0.99 * (len(ordered) - 1))],
        largest=ordered[-1],
    )


def measured(models: int, most: int, seed: int) -> list[Row]:
    chance = random.Random(seed)
    dense, sparse = list[float](), list[float]()
    for _ in range(models):
        layers, link = model(chance, most)

        def end(groups: list[Group], layers: list[Layer] = layers, link: Link = link) -> float:
            return sent(layers, link, groups)[-1].end_s

        dense.append(end(mg_wfbp(layers, link)) / end(fastest(layers, link)))
        sparse.append(end(seamgs(layers, link)) / end(fastest(layers, link, keeps_accuracy)))
    return [summary("MG-WFBP", dense), summary("SEAMGS", sparse)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shown = "(default: %(default)s)"
    parser.add_argument("--models", type=at_least_one, default=3000, help=shown)
    parser.add_argument("--layers", type=at_least_one, default=12, help=f"at most {shown}")
    parser.add_argument("--seed", type=int, default=1, help=shown)
    parser.add_argument("--json", type=file_to_write, metavar="FILE", help="also write the rows here")


def run(given: argparse.Namespace) -> int:
    rows = measured(given.models, max(2, given.layers), given.seed)
    cells = [
        (
            row.rule,
            f"{row.not_best:.0%}",
            *(f"{each:.2f}" for each in (row.median, row.percentile_99, row.largest)),
        )
        for row in rows
    ]
    print(output.table(HEADINGS, cells))
    output.write_json(given.json, [asdict(row) for row in rows])
    return Exit.DONE
