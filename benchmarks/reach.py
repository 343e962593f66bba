"""`gc-bench reach`: time until a job on shaped links has AdamW's final loss, for presets and PyTorch's DDP.

Every worker, and the server, is a real process in a network namespace of its own, behind a link of --mbit in
each direction (`star`); this needs root. Computation is real, and all workers share this machine's cores.

A peer is torch's DistributedDataParallel over gloo with AdamW: `fp32`, `fp16` (its hook) or `powersgd` (its
hook, rank 4). --hooks adds peers with our compressors as hooks (`gradwire.ddp`). The loss to reach is that of
`fp32` after --steps. The rate of the links does not change the losses of a peer. So each peer trains to its
end once without shaped links, for its loss, and takes `TIMED` steps on them. Its time is --steps times the
median of these steps.

A preset trains to its end on the shaped links, once for each of --preset-steps, until one has that loss. The
server measures the time from the first round to the last version. A schedule always ends with the job, so a
shorter job is another training and not the beginning of a longer one.

The ratio has two causes: fewer bytes, and Muon, which needs fewer steps than AdamW. `gc-bench curve` has
Muon's loss without any exchange, as "Muon alone".
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

from ..common.exits import Exit
from ..common.presets import PRESETS
from ..deploy.daemons import at, free_port
from . import output
from .arguments import BenchError, at_least_one, json_option, numbers, option, some_of
from .curve import ADAMW, COMPOSITIONS, SCHEDULE, settings_of
from .ddp import HOOKS, OURS, hook_state
from .ddp_task import RESULT, WARM_UP, Setup, Trained
from .jobs import PATIENCE_S, final_loss, nodes_of, run_job, run_ranks
from .shaped import RANKS_PORT
from .star import Star, check_network
from .step import PEERS

FP32 = "fp32"
RATE = 0.003  # AdamW's learning rate, the best one of gc-bench curve
TIMED = 40  # steps of each peer on the shaped links
SEED = 1
MOST_STEP_S = 30.0  # a peer whose steps take longer hangs
LOSSLESS = 0.005  # a peer whose loss is above the target by at most this fraction counts as reaching it


@dataclass(frozen=True, kw_only=True)
class Reached:
    """A peer, or a preset's job of some length, on links of one rate.

    Attributes:
        mbit: Mbit/s of each link in each direction.
        steps: number of steps of each worker.
        seconds: seconds of all steps.
        reaches: whether that is at most the final loss of DDP with float32. A peer may be 0.5 % above it.
    """

    name: str
    mbit: float
    steps: int
    seconds: float
    loss: float
    reaches: bool


def train_peer(setup: Setup, workers: int, hook: str, steps: int, mbit: float | None) -> Trained:
    """Train under DDP for a number of steps, and return the finished run.

    Args:
        setup: the training.
        workers: number of ranks.
        hook: communication hook, as the program `ddp_task` takes it.
        steps: number of steps to take.
        mbit: Mbit/s of each link in each direction; None for this machine's loopback.
    """
    _, *nodes = nodes_of(workers)
    shaped = nullcontext() if mbit is None else Star(nodes, mbit)
    with shaped as star, tempfile.TemporaryDirectory() as folder:
        address = f"{star.address(nodes[0])}:{RANKS_PORT}" if star else at(free_port())
        first, last = [folder, str(steps), json.dumps(asdict(setup))], [str(workers), address, hook]
        run_ranks(
            nodes,
            "gradwire.benchmarks.ddp_task",
            lambda rank: [*first, str(rank), *last],
            Path(folder),
            star=star,
            seconds=PATIENCE_S + MOST_STEP_S * steps,
        )
        return Trained(**json.loads((Path(folder) / RESULT).read_text(encoding="utf-8")))


def run_preset(name: str, given: argparse.Namespace, steps: int, mbit: float) -> tuple[int, float, float]:
    """Train with a preset on shaped links; return the steps of each worker, the seconds of all rounds, and
    the final loss."""
    settings = settings_of(
        {**COMPOSITIONS[f"preset {name}"], "device": "cpu"},
        task=given.task,
        workers=given.workers,
        batch_size=given.batch_size,
        steps=steps,
        seed=SEED,
    )
    with Star(nodes_of(given.workers), mbit) as star, tempfile.TemporaryDirectory() as folder:
        status = run_job(settings, Path(folder), star=star)
    return status.local_steps or status.version, status.training_seconds, final_loss(name, status)


HEADINGS = ("", "Mbit/s", "steps", "loss", "ms per step", "s", "as fast as the fastest hook of DDP's own")


def table(rows: Sequence[Reached]) -> str:
    """Return a Markdown table. Each row that reaches the loss is compared with the fastest peer that does."""

    def cells(row: Reached) -> list[object]:
        fastest = min(
            (each.seconds for each in rows if each.mbit == row.mbit and each.reaches and is_peer(each.name)),
            default=None,
        )
        ratio = f"{fastest / row.seconds:.1f} ×" if row.reaches and fastest else "not reached"
        return [
            row.name,
            f"{row.mbit:g}",
            row.steps,
            f"{row.loss:.4f}",
            f"{1000 * row.seconds / row.steps:.0f}",
            f"{row.seconds:.0f}",
            ratio,
        ]

    return output.table(HEADINGS, [cells(row) for row in rows])


def is_peer(name: str) -> bool:
    """Return True if `name` is that of a peer with a hook of PyTorch's own."""
    return name.removeprefix("DDP ") in PEERS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option(parser, "--task", str, "characters", "SPEC", "task to train, which reports a loss")
    option(parser, "--workers", at_least_one, 4, "N", "number of workers")
    option(parser, "--batch-size", at_least_one, 16, "N", "samples of each worker in a step")
    option(parser, "--mbit", numbers(100_000), "20,100", "N,...", "Mbit/s of each link in each direction")
    option(parser, "--steps", at_least_one, 1000, "N", "steps of each peer")
    option(parser, "--peers", some_of(PEERS), ",".join(PEERS), "NAME,...", "hooks of PyTorch's DDP")
    text = "compressors to run in DDP, as hooks of gradwire.ddp (default: 4bit 8bit)"
    parser.add_argument("--hooks", nargs="*", default=("4bit", "8bit"), metavar=HOOKS, help=text)
    names = [name for name in PRESETS if name.endswith("communication")]
    option(parser, "--presets", some_of(tuple(PRESETS)), ",".join(names), "NAME,...", "presets to train with")
    text = "lengths of a preset's job, until one reaches the loss"
    option(parser, "--preset-steps", numbers(1_000_000), "500,550,600,700,800,1000", "N,...", text)
    json_option(parser)


def run(given: argparse.Namespace) -> int:
    """Train all peers and presets, and print the table; return the exit code."""
    check_network()
    for hook in given.hooks:
        hook_state(hook)
    if FP32 not in given.peers:
        got = ",".join(given.peers)
        raise BenchError(f"--peers: expected {FP32} among them, whose final loss is the target, got {got}")
    if given.steps <= WARM_UP + 1:
        raise BenchError(f"--steps: expected more than {WARM_UP + 1}, got {given.steps}: {WARM_UP} warm up")
    setup = Setup(
        task=given.task,
        batch_size=given.batch_size,
        optimizer=ADAMW,
        learning_rate=RATE,
        schedule=SCHEDULE,
        all_steps=given.steps,
        seed=SEED,
    )
    hooks = [
        FP32,
        *(each for each in given.peers if each != FP32),
        *(f"{OURS}{each}" for each in given.hooks),
    ]
    losses: dict[str, float] = {}
    for hook in hooks:
        losses[hook] = train_peer(setup, given.workers, hook, given.steps, None).loss
        output.say(f"DDP {hook}: loss {losses[hook]:.4f} after {given.steps} steps")
    rows: list[Reached] = []

    def add(row: Reached) -> None:
        rows.append(row)
        output.say(
            f"{row.name} at {row.mbit} Mbit/s, {row.steps} steps: {row.seconds:.0f} s, loss {row.loss:.4f}"
        )
        output.write_json(given.json, [asdict(each) for each in rows])

    for mbit in given.mbit:
        for hook in hooks:
            timed = train_peer(setup, given.workers, hook, TIMED, mbit)
            add(
                Reached(
                    name=f"DDP {hook}",
                    mbit=mbit,
                    steps=given.steps,
                    seconds=given.steps * timed.step_seconds,
                    loss=losses[hook],
                    reaches=losses[hook] <= losses[FP32] * (1 + LOSSLESS),
                )
            )
        for name in given.presets:
            for steps in given.preset_steps:
                taken, seconds, loss = run_preset(name, given, steps, mbit)
                reaches = loss <= losses[FP32]
                add(Reached(name=name, mbit=mbit, steps=taken, seconds=seconds, loss=loss, reaches=reaches))
                if reaches:
                    break
    print(table(rows))
    return Exit.DONE
