"""The options of gc-server. Imports neither torch nor grpc, so that `--help` answers at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from ..optimizer import parse_optimizer
from ..options import (
    DEFAULT_HTTP_PORT,
    LOG_FORMATS,
    UsageError,
    at_least,
    between,
    option,
    port_number,
)
from ..spec import parse_spec
from .job.modes.interval import parse_local_steps
from .job.schedule import parse_schedule
from .shard.aggregation import parse_aggregation

DEFAULT_PORT = 50051
MAX_UINT32 = 2**32 - 1
MODES = ("sync", "stale", "async", "local", "coded")
STALENESS_RATES = ("none", "inverse")

# The modes that an option is for, where it is not for all of them.
OF_MODES = {
    "backup": ("sync",),
    "redundancy": ("sync", "coded"),
    "straggler_code": ("sync",),
    "staleness": ("stale",),
    "staleness_lr": ("stale", "async"),
    "delay_compensation": ("stale", "async"),
    "local_steps": ("local",),
    "correction": ("local",),
    "outer_optimizer": ("local",),
    "outer_rate": ("local",),
    "aggregation": ("sync", "local"),
    "downlink": ("sync", "stale", "async", "local"),
}


def parse_redundancy(text: str) -> int | None:
    """None for auto. Raises ValueError."""
    if text == "auto":
        return None
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= MAX_UINT32):
        raise ValueError(f"expected a whole number from 1, or auto, got {text!r}")
    return int(text)


def _well_formed(parse: Callable[[str], object]) -> Callable[[str], None]:
    """A check that passes on what a parser raises."""

    def check(text: str) -> None:
        parse(text)

    return check


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    host: str = option("0.0.0.0", "address to listen on; remote peers also need --insecure")
    port: int = option(DEFAULT_PORT, "gRPC port; 0 picks a free one", check=port_number)
    http_port: int = option(
        DEFAULT_HTTP_PORT, "port of /metrics, /livez and /readyz; 0 for none", check=port_number
    )
    task: str = option(
        "digits",
        "what to train: a built-in task or module:function, with options; only workers import it",
        metavar="NAME[:KEY=VALUE,...]",
        check=_well_formed(lambda text: parse_spec("task", text, functions=True)),
    )
    mode: str = option("sync", "how pushes become versions", choices=MODES)
    backup: int = option(0, "sync: members that a round does without", check=between(0, MAX_UINT32))
    redundancy: str = option(
        "1",
        "sync, coded: workers that compute the same, to send less; auto, in coded mode, by measured times",
        metavar="N|auto",
        check=_well_formed(parse_redundancy),
    )
    straggler_code: int = option(
        0,
        "sync: members that a round does without, because others compute their samples too",
        check=between(0, MAX_UINT32),
    )
    staleness: int = option(
        4,
        "stale: clocks that a worker may be ahead of the slowest when it begins a step",
        check=between(0, MAX_UINT32),
    )
    staleness_lr: str = option(
        "none",
        "stale, async: inverse divides a gradient by the versions applied since its base",
        choices=STALENESS_RATES,
    )
    delay_compensation: float = option(
        0.0, "stale, async: lambda of the correction for those versions; 0 for none", check=at_least(0)
    )
    local_steps: str = option(
        "adaptive",
        "local: steps per round, a number or adaptive:first=4,most=16",
        metavar="N|adaptive[:KEY=VALUE,...]",
        check=_well_formed(parse_local_steps),
    )
    correction: float = option(
        0.1, "local: part of the way back to the global model that each step takes", check=between(0, 1)
    )
    outer_optimizer: str = option(
        "sgd",
        "local: applied to the mean change; sgd at rate 1 averages, sgd:momentum=0.9,nesterov=on",
        metavar="NAME[:KEY=VALUE,...]",
        check=_well_formed(parse_optimizer),
    )
    outer_rate: float = option(1.0, "local: learning rate of the outer optimizer", check=at_least(0))
    min_workers: int = option(1, "workers to wait for before the first round", check=at_least(1))
    epochs: int = option(30, "passes over the training samples", check=between(1, MAX_UINT32))
    batch_size: int = option(32, "samples per worker and step", check=between(1, MAX_UINT32))
    seed: int = option(0, "of initial parameters, sample order and compressors", check=between(0, 2**63 - 1))
    optimizer: str = option(
        "sgd",
        "sgd, adam or adamw, with options such as sgd:momentum=0.9,weight_decay=1e-4",
        metavar="NAME[:KEY=VALUE,...]",
        check=_well_formed(parse_optimizer),
    )
    learning_rate: float = option(0.1, "base learning rate", check=at_least(0))
    schedule: str = option(
        "constant",
        "constant, cosine, step or exponential, with options such as cosine:warmup=5",
        metavar="NAME[:KEY=VALUE,...]",
        check=_well_formed(parse_schedule),
    )
    aggregation: str = option(
        "mean",
        "mean, median, trimmed or krum, with options such as krum:wrong=2: how gradients become one",
        metavar="NAME[:KEY=VALUE,...]",
        check=_well_formed(parse_aggregation),
    )
    downlink: str = option(
        "none",
        "compressor of the updates that go to the workers, such as bf16, 4bit or topk:ratio=20",
        metavar="NAME[:KEY=VALUE,...]",
        check=_well_formed(lambda text: parse_spec("compressor", text)),
    )
    lease_seconds: float = option(
        10.0, "a worker that is not heard of for this long is given up", check=at_least(0.5)
    )
    max_model_bytes: int = option(16 << 30, "largest model taken, as float32", check=at_least(4))
    output: str = option("", "write the final parameters here, as safetensors", metavar="FILE")
    stay: bool = option(False, "serve on when the job is done, until told to stop")
    insecure: bool = option(False, "answer remote peers too, without encryption or authentication")
    threads: int = option(0, "threads for aggregation; 0 for one per core", check=at_least(0))
    log_format: str = option("auto", "words, JSON lines, or words on a terminal only", choices=LOG_FORMATS)


def check_together(config: ServerConfig) -> None:
    """What no option can know by itself. Raises UsageError."""
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    for name, modes in OF_MODES.items():
        value = getattr(config, name)
        if value != defaults[name] and config.mode not in modes:
            flag = f"--{name.replace('_', '-')} {value}"
            raise UsageError(f"{flag}: is for --mode {' or '.join(modes)}, and this is --mode {config.mode}")
    if config.staleness_lr != "none" and parse_optimizer(config.optimizer).undoes_weights:
        raise UsageError(
            f"--staleness-lr {config.staleness_lr}: weighs gradients, and --optimizer {config.optimizer} "
            "takes no notice of how large they are; use sgd"
        )
    if config.mode == "sync":
        _check_redundancy(config)
    needed = config.backup + parse_aggregation(config.aggregation).fewest
    if config.min_workers < needed:
        what = f"--aggregation {config.aggregation}"
        if config.backup:
            what = f"--backup {config.backup} with {what}"
        raise UsageError(f"--min-workers {config.min_workers}: {what} needs at least {needed}")


def _check_redundancy(config: ServerConfig) -> None:
    redundancy, stragglers = parse_redundancy(config.redundancy), config.straggler_code
    if redundancy is None:
        raise UsageError(
            "--redundancy auto: is for --mode coded; in sync mode expected a whole number from 1"
        )
    sliced, coded = f"--redundancy {redundancy}", f"--straggler-code {stragglers}"
    asked = [*([sliced] if redundancy > 1 else []), *([coded] if stragglers else [])]
    if not asked:
        return
    if len(asked) > 1:
        raise UsageError(f"{coded}: not with {sliced}; the one saves bytes, the other waiting: choose")
    if config.backup:
        why = "rounds would close without slices that nobody else pushes"
        if stragglers:
            why = "a coded round already does without as many, and loses nothing by it"
        raise UsageError(f"{asked[0]}: not with --backup {config.backup}: {why}")
    if parse_aggregation(config.aggregation) != parse_aggregation("mean"):
        raise UsageError(f"{asked[0]}: needs --aggregation mean, and this is {config.aggregation}")
    if config.min_workers <= stragglers:
        raise UsageError(f"--min-workers {config.min_workers}: {asked[0]} needs at least {stragglers + 1}")
