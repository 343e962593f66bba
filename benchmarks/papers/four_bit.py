"""Tables 2 and 3 of the 4-bit paper: speed-ups of 4bit and 2bit over no compression.

The paper: MXNet, Inception on CIFAR-10 and CIFAR-100, four and two nodes with two P100 each and 10 Gbit/s
between them; seconds of an epoch. If nothing overlaps, its speed-ups follow from shares of communication of
21 to 29 % with an eighth or a sixteenth of the bytes. Here the share is therefore 0.25 unless it is given,
and nothing overlaps. The paper's text says that 4bit wins more on a narrower link, and that 2bit overtakes it
on a still narrower one. In its own tables 2bit is faster already. Larger shares are narrower links.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ..shaped import Setup
from .emulated import Method, MethodRow, computation, exchange_seconds, measure, speedups

# Seconds of an epoch, by number of nodes and method.
TABLE_2: Mapping[int, Mapping[str, float]] = {
    4: {"baseline": 114.0, "2Bit": 83.0, "4Bit": 89.0},
    2: {"baseline": 118.3, "2Bit": 90.4, "4Bit": 97.1},
}
TABLE_3: Mapping[int, Mapping[str, float]] = {
    4: {"baseline": 109.3, "2Bit": 86.4, "4Bit": 88.6},
    2: {"baseline": 113.7, "2Bit": 93.1, "4Bit": 95.3},
}
MODEL = "inception-cifar"
NODES = (4, 2)
SHARES = [0.25]
PAPERS_SHARES = (0.21, 0.29)  # least and largest share of communication in the paper's runs
COMPRESSORS = {"baseline": "none", "2Bit": "2bit", "4Bit": "4bit:levels=groups"}


def methods(model: str, workers: int, share: float) -> list[Method]:
    """Return the methods. They have the paper's speed-ups if the conditions are like the paper's.

    Args:
        model: name of the model.
        workers: number of workers.
        share: communication as a fraction of the uncompressed step, 0 to 1.
    """
    low, high = PAPERS_SHARES
    known = model == MODEL and low <= share <= high
    paper = [speedups(table[workers]) for table in (TABLE_2, TABLE_3) if known and workers in table]
    return [
        Method(name=name, paper=tuple(each[name] for each in paper), compressor=compressor)
        for name, compressor in COMPRESSORS.items()
    ]


def measured(
    setup: Setup, shares: Sequence[float], nodes: Sequence[int]
) -> Iterator[tuple[list[MethodRow], list[Method]]]:
    """Measure all methods on one model, and yield rows and methods for each number of nodes and share.

    Args:
        setup: model, links and number of steps.
        shares: communication as a fraction of the uncompressed step, 0 to 1.
        nodes: numbers of workers.
    """
    for workers in nodes:
        of_workers = replace(setup, workers=workers)
        exchange = exchange_seconds(of_workers, methods(setup.model, workers, 0.0)[0])
        for share in shares:
            found = methods(setup.model, workers, share)
            computing = replace(of_workers, seconds=computation(exchange, share))
            yield measure(computing, share, found), found


def overtaken(found: Sequence[MethodRow]) -> str:
    """Return text that names, by number of workers, the share from which on 2bit is faster than 4bit."""
    times = {(row.workers, row.share, row.method): row.step_seconds for row in found}
    lines: list[str] = []
    for workers in dict.fromkeys(row.workers for row in found):
        ahead = [
            share
            for share in sorted({row.share for row in found})
            if times[workers, share, "2Bit"] < times[workers, share, "4Bit"]
        ]
        where = f"from a share of {ahead[0]:g} on" if ahead else "at none of these shares"
        lines.append(f"{workers} workers: 2bit is faster than 4bit {where}")
    return "\n".join(lines)
