"""Every option of gc-server, gc-worker and gc-run, declared once.

A field made with `option`, here under the name of its group, is an option. Its flag, `GC_` variable, key in a
file, lines of `--help` and `--print-config`, and row in docs/reference/commands.md (`make docs`) come from
it. The class decides which commands have it:

    JobOptions       gc-server, gc-run; workers receive it when they join (the message `Job`)
    JobSettings      JobOptions and --script, which is a switch of gc-server and a command of gc-run
    ServingSettings  gc-server, gc-run
    TrainingSettings gc-worker, gc-run
    ServerSettings, WorkerSettings, RunSettings: that command alone

gc-run passes the options that it shares with a daemon on to it. To add an option, write its field and use it;
no other list needs a change. The options of a mode are in the mode's own file, as in `--mode stale:bound=4`.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from .common import plugins
from .common.addresses import DEFAULT_PORT, parse_address, parse_host
from .common.configuration import REQUIRED, option
from .common.naming import why_no_name
from .common.presets import parse_preset, values_by_preset
from .common.spec import Length, Spec, SpecError, parse_length, parse_spec, unknown
from .optim.optimizer import parse_optimizer

BUILT_IN_TASKS = ("digits", "characters")
_OF_PAPERS = ("cifar10", "cifar100", "mnist", "hyperspectral")

# Each declares an option in one group of --help.
training = partial(option, group="training")
compression = partial(option, group="compression")
connection = partial(option, group="connection")
process = partial(option, group="process")
results = partial(option, group="results")
lasting = partial(option, group="durability")

_MAX_UINT32 = 2**32 - 1
_HTTP_PORT = "port of /metrics, /livez and /readyz{}; 0 for a free one, -1 for none"
_SPEC = "NAME[:KEY=VALUE,...]"
_TASK = "TASK[:KEY=VALUE,...]"


def parse_task(text: str) -> Spec:
    """Return the spec of a task: built in, of another distribution's entry point, or `module:function`; raise
    `SpecError` for other names. Imports no task."""
    spec = parse_spec("task", text, functions=True)
    module, colon, function = spec.name.partition(":")
    if colon and all(part.isidentifier() for part in (*module.split("."), function)):
        return spec
    if spec.name not in BUILT_IN_TASKS and plugins.find("task", spec.name) is None:
        if spec.name in _OF_PAPERS:
            raise SpecError(
                f"task {spec.name!r} is one of the package gradwire-papers, which is not installed; "
                "pip install ./papers in a checkout of Gradwire brings it"
            )
        names = plugins.names("task", BUILT_IN_TASKS)
        raise SpecError(f"{unknown('task', spec.name, names)}; name your own module:function[:key=value,...]")
    return spec


def parse_evaluate_every(text: str) -> Length:
    """Return the length of training that `text` gives, such as 2epochs or 5min; raise ValueError if it is not
    above 0."""
    found = parse_length(text)
    if not found.number:
        raise ValueError(f"expected a length above 0, got {text!r}")
    return found


def _parse_worker_id(text: str) -> None:
    """Raise ValueError if `text` is neither empty nor a valid name."""
    if text and (why := why_no_name(text)):
        raise ValueError(why)


def names_in(text: str) -> tuple[str, ...]:
    """Return the non-empty items of a list with commas."""
    return tuple(part for part in text.split(",") if part)


def _parse_modules(text: str) -> None:
    """Raise ValueError if an item of the list is not a module's name."""
    for name in names_in(text):
        if not all(part.isidentifier() for part in name.split(".")):
            raise ValueError(f"expected module names separated by commas, got {name!r}")


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """Options that define the job, of gc-server and gc-run."""

    task: str = training(
        "digits",
        "task to train: built in, such as digits, of an installed package, or your own module:function",
        metavar=_TASK,
        parse=parse_task,
    )
    preset: str = training(
        "",
        "preset of settings that belong together; any other source overrides its values",
        metavar="NAME",
        parse=parse_preset,
        sets=values_by_preset(),
    )
    mode: str = training(
        "sync",
        "rule by which pushes become a new version of the parameters",
        metavar=_SPEC,
    )
    epochs: int = training(
        30,
        "passes over the training samples; 0 for no limit",
        least=0,
        most=_MAX_UINT32,
    )
    max_steps: int = training(
        0, "versions of the parameters after which the job ends; 0 for no limit", least=0
    )
    max_seconds: float = training(
        0.0,
        "training time after which no step begins; 0 for no limit",
        unit="seconds",
        least=0,
    )
    early_stop: str = training(
        "",
        "metric whose lack of improvement ends the job, such as accuracy:patience=5,delta=0.001: after 5 "
        "evaluations without a gain above 0.001",
        metavar=_SPEC,
    )
    evaluate_every: str = training(
        "1epoch",
        "length of training between two evaluations, such as 2epochs, 500steps, 60s or 5min",
        metavar="LENGTH",
        parse=parse_evaluate_every,
    )
    batch_size: int = training(32, "samples per worker and step", least=1, most=_MAX_UINT32)
    seed: int = training(
        1, "seed for initial parameters, sample order and compressors", least=0, most=2**63 - 1
    )
    optimizer: str = training(
        "sgd",
        "optimizer: sgd, adam, adamw, adagrad, or in mode local also muon, such as sgd:momentum=0.9",
        metavar=_SPEC,
        parse=parse_optimizer,
    )
    learning_rate: float = training(0.1, "base learning rate", least=0)
    schedule: str = training(
        "constant",
        "schedule of the learning rate: constant, cosine, step or exponential, such as "
        "cosine:warmup=10%,minimum=0.1",
        metavar=_SPEC,
    )
    clip_norm: float = training(
        0.0,
        "largest Euclidean norm of the model's mean gradient, which is scaled down to it; 0 for no limit",
        least=0,
    )
    buffers: Literal["mean", "rank0", "local"] = training(
        "mean",
        "source of the evaluated and saved buffers, such as BatchNorm's: mean of the workers, the worker of "
        "lowest rank (rank0), or the evaluating worker (local)",
    )
    overlap: Literal["off", "backward", "both"] = connection(
        "backward",
        "overlap of communication with computation: off, with the backward pass, or with the next forward "
        "pass too (both)",
    )
    fusion: str = connection(
        "bytes",
        "rule that joins neighbouring tensors into units: none, bytes, bytes=N, mgwfbp, mgs, mgs=N or seamgs",
        metavar="NAME[=BYTES]",
    )
    compressor: str = compression(
        "4bit",
        "compressor of gradients, such as topk:ratio=100, for workers without their own; auto for 4bit where "
        "it saves time, or lowrank in tasks with SGD in mode sync",
        metavar=_SPEC,
    )
    downlink: str = compression(
        "auto",
        "compressor of updates: auto (the encoding of most pushes), none (float32), or one such as 4bit",
        metavar=_SPEC,
    )
    entropy: Literal["auto", "on", "off"] = compression(
        "auto",
        "lossless packing of all payloads by zstd: auto (where it saves time on the link), on or off",
    )


@dataclass(frozen=True, kw_only=True)
class JobSettings(JobOptions):
    """All options that define the job. The server sends them to every worker."""

    script: bool = training(False, "job whose workers are your own scripts, which call gradwire.connect")


@dataclass(frozen=True, kw_only=True)
class JobTerms(JobSettings):
    """The job as a worker receives it: its options, its id and its kind of work.

    Attributes:
        id: identifier of the job, unique per start of a server.
        work: kind of work that the mode asks of workers, as a spec: gradients, local or exchange.
    """

    id: str
    work: str


@dataclass(frozen=True, kw_only=True)
class ServingSettings:
    """Options of the server that workers do not receive."""

    aggregation: str = training(
        "mean",
        "aggregation of gradients: mean, median, trimmed or krum, such as krum:wrong=2",
        metavar=_SPEC,
    )
    part_bytes: int = connection(
        0,
        "largest size of a part as float32; 0 for 1/32 of the model, at least 2 MiB, and more with a "
        "sparsifier",
        unit="bytes",
        least=0,
    )
    order: str = connection(
        "fifo",
        "order of waiting parts: fifo, p3 (nearest the input first), credit or credit=N (p3 with at most N "
        "parts in flight), or two-phase (planned)",
        metavar="NAME[=PARTS]",
    )
    replan: str = connection(
        "100",
        "time of new plans of --fusion and --order: every N versions, at a drift of a fifth, or never",
        metavar="N|drift|never",
    )
    lease_seconds: float = connection(
        10.0, "time without a message after which a worker counts as lost", unit="seconds", least=0.5
    )
    progress_seconds: float = connection(
        600.0,
        "time without progress after which a worker's samples go to others; 0 for no limit",
        unit="seconds",
        least=0,
    )
    max_model_bytes: int = connection(
        16 << 30, "size of the largest accepted model as float32", unit="bytes", least=4
    )


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """Options of a worker that gc-run passes to all of its workers."""

    dense_layers: str = compression(
        "",
        "name patterns of parameters sent uncompressed, such as *.head.*,embed*",
        metavar="PATTERN,...",
    )
    compressed_layers: str = compression(
        "",
        "name patterns of parameters compressed although they have fewer than two dimensions",
        metavar="PATTERN,...",
    )
    device: Literal["auto", "cpu", "cuda"] = process(
        "auto", "device to compute on; auto for CUDA if available, else the CPU"
    )
    connect_seconds: float = connection(120.0, "time in which to find the server", unit="seconds", least=0)
    give_up_seconds: float = connection(
        120.0, "time in which to reconnect after the connection broke", unit="seconds", least=0
    )
    leave_seconds: float = connection(
        20.0,
        "time in which to push the residual after SIGTERM or SIGINT; 0 to leave at once",
        unit="seconds",
        least=0,
    )


@dataclass(frozen=True, kw_only=True)
class ProcessSettings:
    """Options of every daemon. gc-run sets them for the daemons that it starts."""

    threads: int = process(0, "CPU threads for computation; 0 for one per core", least=0)
    http_port: int = process(9464, _HTTP_PORT.format(", and of the page"), least=-1, most=65535)
    http_host: str = process(
        "",
        "address of the HTTP port; empty for this machine, or on a server for remote peers for --host",
    )
    log_format: Literal["text", "json"] = process("text", "format of log lines")
    tls_cert: str = connection("", "certificate of this process, as PEM", metavar="FILE")
    tls_key: str = connection("", "private key of --tls-cert, as PEM", metavar="FILE")
    tls_ca: str = connection(
        "",
        "certificates of the authorities that sign the peer's, as PEM; a worker then uses TLS, and a server "
        "wants a certificate of every client",
        metavar="FILE",
    )
    token_file: str = connection(
        "",
        "file of lines TOKEN or WORKER-ID:TOKEN; a server accepts all of them, a worker sends the first",
        metavar="FILE",
    )
    state: str = lasting(
        "",
        "folder, or URL such as s3://BUCKET/JOB, from which this process resumes its job after a restart",
        metavar="DIR|URL",
    )


@dataclass(frozen=True, kw_only=True)
class ServerSettings(ProcessSettings, ServingSettings, JobSettings):
    """Hold the parameters of a training job, aggregate the workers' gradients and apply the optimizer."""

    host: str = connection(
        "0.0.0.0",
        "address to listen on; serves other machines only with TLS and tokens or clients' certificates, or "
        "with --insecure",
        parse=parse_host,
    )
    port: int = connection(DEFAULT_PORT, "gRPC port; 0 for a free one", least=0, most=65535)
    min_workers: int = training(1, "workers to wait for before the first round", least=1)
    insecure: bool = connection(
        False, "service for other machines without encryption or tokens, on trusted networks"
    )
    reflection: bool = connection(False, "gRPC reflection, for tools such as grpcurl, also without a token")
    stay: bool = process(False, "service after the job is done, until SIGTERM or SIGINT")
    output: str = results("", "file for the final parameters, as safetensors", metavar="FILE")
    resume: str = lasting(
        "",
        "state_dict as safetensors, checkpoint, or folder of --state whose parameters a new job starts from",
        metavar="FILE|DIR|URL",
    )
    durability: Literal["none", "journal", "fsync"] = lasting(
        "journal",
        "crashes that an accepted push survives with --state: none before the next checkpoint, those of the "
        "process (journal), or also of the machine (fsync)",
    )
    checkpoint_every: str = lasting(
        "10min",
        "length of training between two checkpoints, such as 1epoch, 500steps or 10min; less if the journal "
        "exceeds eight checkpoints",
        metavar="LENGTH",
        parse=parse_evaluate_every,
    )
    keep: str = results(
        "",
        "metric by which the best version is kept beside --output and in --state, such as best:accuracy",
        metavar="best:METRIC[:min|max]",
    )
    tensorboard: str = results("", "folder for the job's curves, as TensorBoard reads them", metavar="DIR")


@dataclass(frozen=True, kw_only=True)
class WorkerSettings(ProcessSettings, TrainingSettings):
    """Join a training job: compute gradients, compress them, push them to the server."""

    http_port: int = process(9465, _HTTP_PORT.format(""), least=-1, most=65535)
    server: str = connection(
        REQUIRED,
        f"address of the server; the port defaults to {DEFAULT_PORT}",
        metavar="HOST[:PORT]",
        parse=parse_address,
    )
    worker_id: str = connection(
        "",
        "name of this worker, unique in the job; empty for host name, process id and six random digits",
        parse=_parse_worker_id,
    )
    compressor: str = compression(
        "",
        "compressor of gradients, such as topk:ratio=100; empty for the server's choice",
        metavar=_SPEC,
    )
    preset: str = training(
        "",
        "only preset whose jobs this worker joins; empty for any job",
        metavar="NAME",
        parse=parse_preset,
    )
    task: str = training(
        "",
        "only task that this worker trains; empty for the server's choice, if built in or in --allow-task",
        metavar=_TASK,
        parse=lambda text: parse_task(text) if text else None,
    )
    allow_task: str = training(
        "",
        "modules, and names of installed tasks, whose functions the server may name as task",
        metavar="MODULE,...",
        parse=_parse_modules,
    )


def access_files(settings: WorkerSettings) -> dict[str, str]:
    """Return the paths of the worker's TLS and token files by option name, such as "tls_ca"; empty text for a
    file that was not given."""
    names = ("tls_ca", "tls_cert", "tls_key", "token_file")
    return {name: getattr(settings, name) for name in names}


@dataclass(frozen=True, kw_only=True)
class RunSettings(TrainingSettings, ServingSettings, JobOptions):
    """Train with one server and several workers on this machine, and compare with an uncompressed run."""

    script: str = training(
        "",
        "command of your own script, which calls gradwire.connect, to run as every worker, such as "
        "'python train.py'; empty to train --task",
        metavar="COMMAND",
        parse=shlex.split,
    )
    workers: int = training(4, "worker processes", least=1)
    entropy: Literal["auto", "on", "off"] = compression(
        "on",
        "lossless packing of all payloads by zstd: on, so that the report has the bytes of a slow link, auto "
        "or off",
    )
    http_port: int = process(
        0,
        "port of the server's /metrics; 0 for a free one, -1 for none, also at the workers",
        least=-1,
        most=65535,
    )
    baseline: bool = results(True, "second run without compression, for comparison; off with --script")
    json: str = results("", "file for an additional copy of the report, as JSON", metavar="FILE")
    out: str = results("", "folder for logs, report and plot; empty for a new one in runs/", metavar="DIR")


# Name of each command by the dataclass of its options. --help shows the docstring of that class.
COMMANDS: Mapping[type[Any], str] = {
    ServerSettings: "gc-server",
    WorkerSettings: "gc-worker",
    RunSettings: "gc-run",
}
