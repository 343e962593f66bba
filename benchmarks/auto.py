"""`gc-bench auto`: speed-up by `--compressor auto` where compression pays, and its cost where it does not.

Where it pays: the uncompressed exchange is measured first. Then computation is emulated for so long that this
exchange takes the share --share of computation and exchange. If compression took no time and divided the
bytes by c, a step would be `1 / (1 - share + share / c)` times as fast. This c is measured: the bytes of the
uncompressed run divided by those of the other run.

Where it cannot pay: many small tensors, on links without a limit, and hardly any computation.

Real daemons behind links as in `gc-bench step`; this needs root. Nothing overlaps. Times are mean seconds per
step after the first steps. They include all trials that `auto` makes of the other method.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import asdict, dataclass, replace

from ..common.exits import Exit
from . import output
from .arguments import BenchError, amount, at_least_one, json_option, option
from .papers.emulated import Method, computation, exchange_seconds, shares
from .shaped import Recorded, Setup, run_ours
from .star import check_network

LOSING = "200x4096"  # the model for which compression cannot pay
WARM_UP = 30  # steps: a window of measurements, a trial, and the first steps after it
NONE = Method(name="none")


@dataclass(frozen=True, kw_only=True)
class AutoRow:
    """A row of the table: an uncompressed and an automatic run at one share of communication.

    Attributes:
        share: communication as a fraction of the uncompressed step, 0 to 1; None where compression cannot
            pay.
        none_s: mean seconds of an uncompressed step.
        auto_s: mean seconds of a step with `auto`.
        fewer: bytes into the server of the uncompressed run, divided by those of the automatic run.
    """

    share: float | None
    none_s: float
    auto_s: float
    fewer: float

    @property
    def speedup(self) -> float:
        """The seconds of an uncompressed step divided by those of an automatic one."""
        return self.none_s / self.auto_s

    @property
    def ideal(self) -> float:
        """The speed-up that would be reached if compression took no time; 1 where it cannot pay."""
        return 1.0 if self.share is None else 1 / (1 - self.share + self.share / self.fewer)


HEADINGS = ("share", "s per step, `none`", "`auto`", "times fewer bytes", "speed-up", "ideal", "of it")


def cells(row: AutoRow) -> list[object]:
    """Return the cells of a row of the table, in the order of `HEADINGS`."""
    share = "no limit" if row.share is None else f"{row.share:g}"
    return [
        share,
        *(f"{row.none_s:.4f}", f"{row.auto_s:.4f}", f"{row.fewer:.2f}"),
        *(f"{row.speedup:.3f}", f"{row.ideal:.3f}", f"{row.speedup / row.ideal:.3f}"),
    ]


def mean_step(recorded: Recorded) -> float:
    """Return the mean seconds of a step, over all counted steps of all workers."""
    return statistics.fmean(
        (trace[-1].began - trace[0].began) / (len(trace) - 1) for trace in recorded.counted
    )


def measured(setup: Setup, compressor: str, share: float | None) -> AutoRow:
    """Train once uncompressed and once with `compressor`, and return the comparison.

    Args:
        setup: model, links and computation.
        compressor: spec of `auto`.
        share: communication as a fraction of the uncompressed step, for the row.
    """
    none, auto = (run_ours(setup, name, "auto", "off") for name in ("none", compressor))
    return AutoRow(
        share=share,
        none_s=mean_step(none),
        auto_s=mean_step(auto),
        fewer=none.bytes_in / auto.bytes_in,
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option(parser, "--model", str, "4x262144", "NAME", "layer table, as for gc-bench step")
    option(parser, "--workers", at_least_one, 4, "N", "number of workers")
    option(parser, "--compressor", str, "auto", "SPEC", "auto, with its options")
    text = "fractions of an uncompressed step that the exchange takes, one run for each"
    option(parser, "--share", shares, "0.25,0.5,0.75,0.9", "N,...", text)
    option(parser, "--mbit", amount, 1000.0, "N", "Mbit/s of each link in each direction")
    option(parser, "--steps", at_least_one, 40, "N", "number of measured steps")
    json_option(parser)


def run(given: argparse.Namespace) -> int:
    """Measure a row for each share, and one where compression cannot pay; return the exit code."""
    if given.compressor.partition(":")[0] != "auto":
        raise BenchError(f"--compressor: expected auto, or auto:compressor=SPEC, got {given.compressor!r}")
    check_network()
    setup = Setup(
        model=given.model, workers=given.workers, mbit=given.mbit, steps=given.steps, warm_up=WARM_UP
    )
    print(output.table(HEADINGS, []), flush=True)
    exchange = exchange_seconds(replace(setup, warm_up=10, steps=12), NONE)
    rows = list[AutoRow]()
    for share in [*given.share, None]:
        if share is None:
            fitted = replace(setup, model=LOSING, mbit=0.0)
        else:
            fitted = replace(setup, seconds=computation(exchange, share))
        rows.append(measured(fitted, given.compressor, share))
        print(output.row(cells(rows[-1])), flush=True)
    output.write_json(given.json, [asdict(row) | {"ideal": row.ideal} for row in rows])
    return Exit.DONE
