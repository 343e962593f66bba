"""`gc-bench adam`: what every compressor costs a small GPT, whose optimizer at the server is AdamW.

Real daemons, as gc-run starts them: `--task characters` with four workers, a learning rate that warms up and
falls, the mean gradient clipped, the way down compressed as the way up. Runs with the same seed start from
the same parameters and see the same samples, so a loss is set against that of the uncompressed run of its
seed. Rounds are those of `sync`: what else the machine does has no say in a loss.

Three groups of rows: what is claimed (4bit within 1 % of the uncompressed loss), every other compressor with
the same optimizer, and what to do instead where those lose: a warm-up of sparsity, momentum at the workers
with plain SGD, local steps.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from ..compressors import create
from ..deploy.processes import RunError
from ..deploy.report import write_atomically
from ..exits import Exit
from ..settings import RunSettings
from . import output
from .accuracy import estimate, seed_list
from .arguments import at_least_one, file_to_write, some_of
from .jobs import train

WORKERS = 4
TASK = "characters:characters=500000"
EPOCHS = 4
BATCH = 16
ADAMW = "adamw:weight_decay=0.1"
SCHEDULE = "cosine:warmup=0.4"
CLAIMED = 1.01  # of the uncompressed loss


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How a job trains."""

    compressor: str
    mode: str = "sync"
    optimizer: str = ADAMW
    learning_rate: float = 3e-3
    clip_norm: float = 1.0

    @property
    def name(self) -> str:
        """What one types, where it is not as in the first group."""
        usual = Setup(compressor=self.compressor)
        texts = [f"`{self.compressor}`"]
        for option in ("mode", "optimizer", "learning_rate", "clip_norm"):
            value = getattr(self, option)
            if value != getattr(usual, option):
                texts.append(f"`--{option.replace('_', '-')} {value}`")
        return " ".join(texts)


def _local(compressor: str, steps: int) -> Setup:
    # Workers take the steps there, so there is no gradient that the server could clip.
    return Setup(compressor=compressor, mode=f"local:steps={steps},correction=0", clip_norm=0.0)


def _plain(compressor: str, optimizer: str = "sgd") -> Setup:
    return Setup(compressor=compressor, optimizer=optimizer, learning_rate=0.1)


BASELINE = Setup(compressor="none")
GROUPS: Mapping[str, Sequence[Setup]] = {
    "claimed": (BASELINE, Setup(compressor="4bit")),
    "others": tuple(
        Setup(compressor=compressor)
        for compressor in (
            *("bf16", "fp16", "8bit", "qsgd", "2bit", "terngrad", "1bit", "signsgd", "threshold"),
            *("topk:ratio=10", "topk", "gcac", "randk:ratio=10", "randk", "l1", "dgc", "krngc"),
        )
    ),
    "instead": (
        Setup(compressor="topk:warmup=2"),
        Setup(compressor="topk:momentum=0.9", optimizer=f"{ADAMW},beta1=0"),
        _plain("none", "sgd:momentum=0.9"),
        _plain("topk:momentum=0.9"),
        _plain("dgc"),
        *(_local(compressor, steps=8) for compressor in ("none", "4bit", "1bit", "topk:ratio=10", "topk")),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """One job. loss: on the validation data in the end; None if training diverged. Bytes: on the wire."""

    setup: Setup
    seed: int
    loss: float | None
    bytes_up: int
    bytes_down: int


def measure(setup: Setup, seed: int, given: argparse.Namespace, directory: Path) -> Run:
    """Raises RunError for a job that did not come to its end, and one that has lost a worker."""
    settings = RunSettings(
        task=given.task,
        workers=WORKERS,
        epochs=given.epochs,
        batch_size=given.batch_size,
        seed=seed,
        schedule=SCHEDULE,
        **asdict(setup),
    )
    try:
        result = train(settings, directory)
    except RunError as error:
        if error.code != Exit.DIVERGED:
            raise
        return Run(setup=setup, seed=seed, loss=None, bytes_up=0, bytes_down=0)
    if result.lost_workers:
        raise RunError(Exit.INTERNAL, f"{setup.name}: lost {', '.join(result.lost_workers)}; run it again")
    return Run(
        setup=setup,
        seed=seed,
        loss=result.validation_loss,
        bytes_up=result.wire_bytes_up,
        bytes_down=result.wire_bytes_down,
    )


def ratio_of(runs: Sequence[Run], baseline: Sequence[Run]) -> float | None:
    """The mean over seeds of a loss by that of the uncompressed run; None if one diverged."""
    ratios: list[float] = []
    for run, base in zip(runs, baseline, strict=True):
        if run.loss is None or base.loss is None:
            return None
        ratios.append(run.loss / base.loss)
    return fmean(ratios)


def table(runs: Sequence[Run]) -> str:
    """A row for each setup, in the order of its first run. Bytes are set against those of `none`."""
    by_setup: dict[Setup, list[Run]] = {}
    for run in runs:
        by_setup.setdefault(run.setup, []).append(run)
    of_seed = {run.seed: run for run in by_setup[BASELINE]}

    def cells(setup: Setup) -> Iterable[object]:
        mine = by_setup[setup]
        baseline = [of_seed[run.seed] for run in mine]
        yield setup.name
        ratio = ratio_of(mine, baseline)
        if ratio is None:
            yield from ("diverged", "–", "–", "–")
            return
        yield estimate([run.loss for run in mine if run.loss is not None])
        yield f"{100 * (ratio - 1):+.1f} %"
        yield from (
            f"1/{sum(getattr(run, way) for run in baseline) / sum(getattr(run, way) for run in mine):.1f}"
            for way in ("bytes_up", "bytes_down")
        )

    headings = ("compressor", "validation loss", "against `none`", "bytes up", "bytes down")
    return output.table(headings, map(cells, by_setup))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shown = "(default: %(default)s)"
    parser.add_argument("--seeds", type=seed_list, default="1,2,3", metavar="N,...", help=shown)
    names = ",".join(GROUPS)
    parser.add_argument("--rows", type=some_of([*GROUPS]), default=names, metavar="GROUP,...", help=shown)
    text = "only these, with AdamW at the server"
    parser.add_argument("--compressors", nargs="+", metavar="SPEC", help=text)
    parser.add_argument("--task", default=TASK, help=shown)
    parser.add_argument("--epochs", type=at_least_one, default=EPOCHS, help=shown)
    parser.add_argument("--batch-size", type=at_least_one, default=BATCH, help=f"of each worker {shown}")
    parser.add_argument("--json", type=file_to_write, metavar="FILE", help="every run, as soon as it is done")
    parser.add_argument("--markdown", type=file_to_write, metavar="FILE", help="what is printed")


def run(given: argparse.Namespace) -> int:
    """Returns 1 if 4bit is not as near to the uncompressed loss as is claimed."""
    setups = [setup for group in given.rows for setup in GROUPS[group]]
    if given.compressors:
        for spec in given.compressors:
            create(spec)
        setups = [Setup(compressor=spec) for spec in given.compressors]
    runs: list[Run] = []
    for seed in given.seeds:  # seeds outside: what an interruption leaves is complete seeds
        for setup in dict.fromkeys((BASELINE, *setups)):
            with tempfile.TemporaryDirectory() as directory:
                runs.append(measure(setup, seed, given, Path(directory)))
            output.say(f"seed {seed}, {setup.name}: {_shown(runs[-1].loss)}")
            output.write_json(given.json, [asdict(each) for each in runs])
    text = f"`{given.task}`, {WORKERS} workers, batches of {given.batch_size}, {given.epochs} epochs, seeds "
    text += f"{', '.join(map(str, given.seeds))}.\n\n{table(runs)}\n"
    print(text)
    if given.markdown is not None:
        write_atomically(given.markdown, text)
    ratio = claimed_ratio(runs)
    if ratio is not None and ratio > CLAIMED:
        print(f"does not hold: 4bit has {ratio:.4f} of the uncompressed loss, claimed at most {CLAIMED}")
        return 1
    return Exit.DONE


def claimed_ratio(runs: Sequence[Run]) -> float | None:
    """Of `4bit` with the usual options; infinite if it diverged, None if it was not run."""
    mine = [run for run in runs if run.setup == Setup(compressor="4bit")]
    if not mine:
        return None
    ratio = ratio_of(mine, [run for run in runs if run.setup == BASELINE])
    return float("inf") if ratio is None else ratio


def _shown(value: Any) -> str:
    return "diverged" if value is None else f"{value:.4f}"
