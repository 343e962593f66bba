"""The runs that `same_bits.py` records: each ends with the same parameters, bit for bit each time.

Runs that depend on time are left out: `stale` and `async` with workers that race, a straggler that is merely
slow, `auto` compressors, plans by measured times for sparsifiers. `make kills` kills workers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

COMPRESSORS = ("none", "4bit", "topk:ratio=100", "dgc:ratio=100,warmup=1", "1bit")


@dataclass(frozen=True)
class Run:
    """One job.

    Attributes:
        name: what it is, with slashes between.
        options: of gc-server, beyond those of all runs.
        script: a function of `same_bits_jobs`, run by every worker in place of a task.
        state: server and workers have --state.
        kills: versions at which the server is killed and started again.
        stops: versions at which server and workers are stopped, and started again with their --state.
        resumes: once the job is done, another one continues from its last checkpoint.
        hangs: the last worker hangs in its first step.
        quick: it is among those of --quick.
    """

    name: str
    options: tuple[str, ...] = ()
    compressor: str = "4bit"
    worker_options: tuple[str, ...] = ()
    workers: int = 3
    task: str = "plain"
    script: str = ""
    state: bool = False
    kills: tuple[int, ...] = ()
    stops: tuple[int, ...] = ()
    resumes: bool = False
    hangs: bool = False
    quick: bool = False


@dataclass(frozen=True)
class Mode:
    """A mode of the matrix, and what it admits of that.

    Attributes:
        overlaps: values of --overlap that differ in it. `both` is `backward` in all modes but `sync` and
            `local`, which one run each is enough for.
        compressors, states: all that it admits.
    """

    mode: str
    workers: int
    task: str = "plain"
    overlaps: tuple[str, ...] = ("off", "backward")
    compressors: tuple[str, ...] = COMPRESSORS
    states: tuple[bool, ...] = (False, True)


REDUNDANT = "sync:redundancy=2"
MATRIX = (
    Mode("sync", 3, overlaps=("off", "backward", "both")),
    Mode(REDUNDANT, 4),
    Mode("stale:bound=1", 1),
    Mode("async:rate=inverse", 1),
    Mode("local:steps=3", 3, overlaps=("off", "backward", "both")),
    Mode("local:steps=2,delayed=on", 3),
    # Nothing is compressed, and --state is refused: the server has nothing of its own to continue from.
    Mode("coded:redundancy=2", 3, compressors=("none",), states=(False,)),
)


def _matrix() -> Iterator[Run]:
    for each in MATRIX:
        for compressor, overlap, state in itertools.product(each.compressors, each.overlaps, each.states):
            yield Run(
                f"{each.mode}/{compressor}/overlap={overlap}" + ("/state" if state else ""),
                ("--mode", each.mode, "--overlap", overlap),
                compressor,
                workers=each.workers,
                task=each.task,
                state=state,
                # Each mode and each compressor once, and `sync` with everything that travels early.
                quick=(overlap, state) == (each.overlaps[-1], True)
                and (each.mode == "sync" or compressor == "4bit"),
            )


# In `sync` unless a mode is named, and with everything else as it is by default.
OTHERS = (
    Run("mode/adaptive local", ("--mode", "local:steps=adaptive,first=2,most=4")),
    Run(
        "mode/outer optimizer",
        ("--mode", "local:steps=3,correction=0,outer=sgd/momentum=0.9/nesterov=on,outer_rate=0.7"),
    ),
    Run("mode/coded", ("--mode", "coded"), "none"),
    Run("mode/coded:redundancy=3", ("--mode", "coded:redundancy=3"), "none", workers=4),
    Run("mode/backup, one hangs", ("--mode", "sync:backup=1"), task="hanging", hangs=True),
    Run("mode/stragglers, one hangs", ("--mode", "sync:stragglers=1"), "none", task="hanging", hangs=True),
    Run("one worker", workers=1),
    Run("max-steps", ("--max-steps", "7", "--epochs", "0")),
    Run("clip-norm", ("--clip-norm", "0.3"), quick=True),
    Run("clip-norm/overlap=both", ("--clip-norm", "0.3", "--overlap", "both")),
    Run("aggregation/median", ("--aggregation", "median"), "none"),
    Run("aggregation/trimmed", ("--aggregation", "trimmed", "--overlap", "both"), "none", workers=4),
    Run("aggregation/krum", ("--aggregation", "krum"), workers=5),
    Run("schedule/step", ("--schedule", "step:every=4steps,gamma=0.5")),
    Run("schedule/exponential", ("--schedule", "exponential:gamma=0.8")),
    Run("parts/no fusion, order p3", ("--fusion", "none", "--order", "p3"), "topk:ratio=100"),
    Run("parts/order credit", ("--order", "credit=2", "--overlap", "both"), "topk:ratio=100"),
    Run("parts/fusion mgwfbp, order two-phase", ("--fusion", "mgwfbp", "--order", "two-phase")),
    Run("parts/default size", ("--part-bytes", "0"), "topk:ratio=100"),
    Run("layers", worker_options=("--dense-layers", "0.*", "--compressed-layers", "5.bias")),
)
OTHER_COMPRESSORS = (
    *("bf16", "fp16", "8bit", "2bit:threshold=0.01", "qsgd", "qsgd:bits=2,norm=l2,feedback=on", "terngrad"),
    *("signsgd", "4bit:levels=groups", "4bit:levels=group1,scale=mean", "4bit:decay=0.9"),
    *("1bit:block=32", "1bit:block=4096,decay=0.9"),
    *("randk:ratio=10", "randk:ratio=10,draw=uniform", "randk:ratio=10,density=norm", "threshold:tau=0.01"),
    *("topk:ratio=10,values=4bit", "topk:ratio=10,values=8bit", "topk:ratio=50,warmup=1,momentum=0.9"),
    *("topk:ratio=10,clip=0.1", "topk:ratio=10,delay=2", "l1:ratio=5", "gcac:ratio=20", "krngc:ratio=20"),
)
DOWNLINKS = ("none", "4bit", "8bit", "1bit", "1bit:block=4096", "topk:ratio=10")
OPTIMIZERS = (
    ("sgd:momentum=0.9,nesterov=on,weight_decay=1e-3", "0.02"),
    ("adam", "0.003"),
    ("adamw:weight_decay=0.1", "0.003"),
    ("adagrad", "0.02"),
)


def _options() -> Iterator[Run]:
    yield from OTHERS
    for each in MATRIX:
        if "both" in each.overlaps:  # the matrix has it
            continue
        compressor = each.compressors[:2][-1]
        options = ("--mode", each.mode, "--overlap", "both")
        yield Run(f"{each.mode}/{compressor}/overlap=both", options, compressor, workers=each.workers)
    for compressor in OTHER_COMPRESSORS:
        yield Run(f"compressor/{compressor}", ("--overlap", "both"), compressor)
    for downlink, overlap in itertools.product(DOWNLINKS, ("backward", "both")):
        yield Run(f"downlink/{downlink}/overlap={overlap}", ("--downlink", downlink, "--overlap", overlap))
    for optimizer, rate in OPTIMIZERS:
        options = ("--optimizer", optimizer, "--learning-rate", rate)
        yield Run(f"optimizer/{optimizer}/sync", (*options, "--overlap", "both"), "8bit", state=True)
        yield Run(f"optimizer/{optimizer}/local", (*options, "--mode", "local:steps=3"), "8bit")
        yield Run(f"optimizer/{optimizer}/coded", (*options, "--mode", "coded:redundancy=2"), "none")


def _gradients() -> Iterator[Run]:
    """Yield runs with unusual gradients and models."""
    odd = ("--epochs", "3", "--learning-rate", "1e-4")
    for mode, workers, overlaps, compressor in (
        ("sync", 3, ("off", "backward", "both"), "1bit"),
        (REDUNDANT, 4, ("off", "backward"), "1bit"),
        ("local:steps=3", 3, ("off",), "1bit"),
        ("local:steps=2,delayed=on", 3, ("off",), "1bit"),
        ("coded:redundancy=2", 4, ("off",), "none"),
    ):
        for overlap in overlaps:
            options = ("--mode", mode, "--overlap", overlap)
            for what, factor in (("not finite", "nan"), ("a spike", "1e6")):
                name, task = f"{what}/{mode}/overlap={overlap}", f"plain:factor={factor}"
                yield Run(name, (*options, *odd), compressor, workers=workers, task=task)
        name, compressor = f"unusual model/{mode}", compressor.replace("1bit", "4bit")
        usual = ("--mode", mode, "--overlap", overlaps[-1])
        yield Run(name, usual, compressor, workers=workers, task="unusual", quick=mode == "sync")
    adamw = ("--optimizer", "adamw", "--learning-rate", "0.003", "--buffers", "rank0")
    yield Run("unusual model/adamw", adamw, "8bit", task="unusual")


def _turns() -> Iterator[Run]:
    """Yield runs in modes without rounds in which two workers push alternately."""
    for mode, steps in (
        ("async", 24),
        ("async:rate=inverse,compensation=0.1", 24),
        ("stale:bound=1", 6),  # a worker that seems slow is given smaller batches after its third step
    ):
        # The last two pushes come in any order, and change nothing: their rate is too small.
        schedule = ("--schedule", f"step:every={steps - 2}steps,gamma=1e-30")
        options = ("--mode", mode, "--epochs", "1", *schedule)
        for compressor in ("4bit", "topk:ratio=10"):
            name = f"two workers in turns/{mode}/{compressor}"
            quick = "compensation" in mode and compressor == "4bit"
            yield Run(name, options, compressor, workers=2, task=f"turns:steps={steps}", quick=quick)


def _scripts() -> Iterator[Run]:
    for script, mode, workers in (
        *(("gradients", "sync", 3), ("plain", "sync", 3), ("clipped", "sync", 3), ("overflowing", "sync", 3)),
        *(("local", "sync", 3), ("local", "local:steps=3", 3), ("plain", REDUNDANT, 4)),
    ):
        clip = ("--clip-norm", "0.5") if script == "clipped" else ()
        for overlap in ("off", "backward", "both"):
            name, options = f"script/{script}/{mode}", ("--mode", mode, "--overlap", overlap, *clip)
            quick = (script, mode, overlap) in (("gradients", "sync", "both"), ("local", "sync", "off"))
            yield Run(f"{name}/overlap={overlap}", options, workers=workers, script=script, quick=quick)


KILLS = (
    Run("sync", quick=True),
    Run("sync/overlap=both", ("--overlap", "both", "--downlink", "4bit")),
    Run("sync/dgc", ("--overlap", "both", "--optimizer", "sgd"), COMPRESSORS[3]),
    Run(REDUNDANT, ("--mode", REDUNDANT, "--downlink", "8bit"), workers=4),
    Run("local", ("--mode", "local:steps=2", "--epochs", "4")),
    # What seeds dropout in `async` is the number of an assignment, and a kill may use one up.
    Run("async", ("--mode", "async"), workers=1, task="plain:slow=0.03,dropout=0"),
)
STOPS = (
    Run("sync", quick=True),
    Run("sync/script", script="gradients"),
    Run("sync/dgc", ("--overlap", "both", "--optimizer", "sgd"), COMPRESSORS[3]),
    Run("local", ("--mode", "local:steps=2", "--epochs", "4"), "1bit"),
)


def _interrupted() -> Iterator[Run]:
    momentum = ("--optimizer", "sgd:momentum=0.9", "--learning-rate", "0.02", "--checkpoint-every", "3steps")
    for run in (
        *(replace(each, name=f"the server is killed/{each.name}", kills=(4, 11)) for each in KILLS),
        *(replace(each, name=f"all are stopped/{each.name}", stops=(5, 10)) for each in STOPS),
    ):
        task = "plain:slow=0.03" if run.task == "plain" else run.task
        yield replace(run, options=(*momentum, *run.options), task=task, state=True)
    for mode, optimizer in (("sync", "adam"), ("local:steps=3,outer=sgd/momentum=0.9", "sgd")):
        options = ("--mode", mode, "--optimizer", optimizer, "--learning-rate", "0.003")
        yield Run(f"another job resumes/{mode}", options, state=True, resumes=True)


RUNS = (*_matrix(), *_options(), *_gradients(), *_turns(), *_scripts(), *_interrupted())
