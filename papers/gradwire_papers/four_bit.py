"""Tables 2 and 3 of the 4-bit paper: speed-ups of 4bit and 2bit over no compression.

The paper: MXNet, Inception on CIFAR-10 and CIFAR-100, four and two nodes with two P100 each and 10 Gbit/s
between them; seconds of an epoch. Nothing overlaps here. An eighth or a sixteenth of the bytes then gives the
paper's speed-ups at these shares of communication:

    both directions compressed:  0.18 to 0.29. Rows "2Bit" and "4Bit": a job's default.
    the push alone compressed:   0.37 to 0.58, if half of the exchange is the push. Rows "push only", with
                                 --downlink none. This is the paper's method.

So both shares are measured unless --shares is given. The paper's text says that 4bit wins more on a narrower
link, and that 2bit overtakes it on a still narrower one. In its own tables 2bit is faster already. Larger
shares are narrower links; at --mbit 100 or less the link takes longer than the processors do.

Erratum: 114 s on four nodes against 118.3 s on two mean that 96 % of an epoch does not become shorter with
twice the nodes, against a share of communication of 25 %.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from gradwire.benchmarks import Setup

from .emulated import MBIT, Method, MethodRow, computation, exchange_seconds, measure, of_methods, speedups
from .result import Conditions, Result

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
# Least and largest share of communication that the paper's speed-ups imply.
BOTH_WAYS = (0.18, 0.29)
PUSH_ONLY = (0.37, 0.58)
BASELINE = "baseline"
COMPRESSORS = {"2Bit": "2bit", "4Bit": "4bit:levels=groups"}


def methods(model: str, workers: int, share: float) -> list[Method]:
    """Return the methods. They have the paper's speed-ups if the conditions are like the paper's."""
    tables = [speedups(table[workers]) for table in (TABLE_2, TABLE_3) if workers in table]

    def paper(name: str, *ranges: tuple[float, float]) -> tuple[float, ...]:
        known = model == MODEL and any(low <= share <= high for low, high in ranges)
        return tuple(each[name] for each in tables) if known else ()

    found = [Method(name=BASELINE, paper=paper(BASELINE, BOTH_WAYS, PUSH_ONLY))]
    for name, compressor in COMPRESSORS.items():
        found.append(Method(name=name, paper=paper(name, BOTH_WAYS), compressor=compressor))
    for name, compressor in COMPRESSORS.items():
        method = Method(
            name=push_only(name), paper=paper(name, PUSH_ONLY), compressor=compressor, downlink="none"
        )
        found.append(method)
    return found


def push_only(name: str) -> str:
    """Return the name of the row in which this method compresses the push alone."""
    return f"{name}, push only"


def measured(
    conditions: Conditions,
    *,
    models: Sequence[str],
    shares: Sequence[float],
    nodes: Sequence[int],
    steps: int,
    workers: int = 0,
    mbit: float = MBIT,
) -> Result:
    """Repeat tables 2 and 3 of the paper. `nodes`, the numbers of workers, counts unless `workers` is
    given. Arguments as for `of_methods`."""
    numbers = [workers] if workers else nodes

    def of(setup: Setup) -> Iterator[tuple[list[MethodRow], list[Method]]]:
        for each in numbers:
            of_workers = replace(setup, workers=each)
            exchange = exchange_seconds(of_workers, methods(setup.model, each, 0.0)[0])
            for share in shares:
                found = methods(setup.model, each, share)
                yield measure(replace(of_workers, seconds=computation(exchange, share)), share, found), found

    return of_methods(models, of, steps=steps, workers=max(numbers), mbit=mbit, remark=overtaken)


def overtaken(found: Sequence[MethodRow]) -> str:
    """Return text that names the share from which on 2bit is faster than 4bit, for each number of workers,
    with both directions compressed and with the push alone."""
    times = {(row.workers, row.share, row.method): row.step_seconds for row in found}
    lines: list[str] = []
    for workers in dict.fromkeys(row.workers for row in found):
        for two, four in (("2Bit", "4Bit"), (push_only("2Bit"), push_only("4Bit"))):
            ahead = [
                share
                for share in sorted({row.share for row in found})
                if times[workers, share, two] < times[workers, share, four]
            ]
            where = f"from a share of {ahead[0]:g} on" if ahead else "at none of these shares"
            lines.append(f"{workers} workers: {two} is faster than {four} {where}")
    return "\n".join(lines)
