"""Every option of gc-server, gc-worker and gc-run, declared once.

A field made with `option`, here under the name of its group, is an option. Flag, `GC_` variable, key in a
file, `--help`, `--print-config` and the tables of docs/reference/commands.md (`make docs`) come from it. The class says
which commands have it:

    JobSettings      gc-server, gc-run; every worker is told when it joins (the message `Job`)
    ServingSettings  gc-server, gc-run
    TrainingSettings gc-worker, gc-run
    ServerSettings, WorkerSettings, RunSettings: that command alone

gc-run hands on what it shares with a daemon. To add an option, write its field and use it: nothing else lists
options. The options of a mode are not here but in the mode's own file, as in `--mode stale:bound=4`.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from .common.configuration import REQUIRED, option
from .common.naming import why_no_name
from .common.spec import Length, Spec, SpecError, parse_length, parse_spec, unknown
from .optim.optimizer import parse_optimizer

DEFAULT_PORT = 50051
BUILT_IN_TASKS = ("digits", "characters", "cifar10", "cifar100", "mnist", "hyperspectral")

# An option of each group of --help.
training = partial(option, group="training")
compression = partial(option, group="compression")
connection = partial(option, group="connection")
process = partial(option, group="process")
results = partial(option, group="results")
lasting = partial(option, group="durability")

_MAX_UINT32 = 2**32 - 1
_HTTP_PORT = "port of /metrics, /livez and /readyz; 0 for a free one, -1 for none"
_TLS_CERT = "certificate by which this end shows who it is, as PEM; read again when it changes on a server"
_TLS_KEY = "key of that certificate, as PEM"
_TLS_CA = (
    "certificates of the authorities by which the other end's is checked, as PEM; with it a server wants one "
    "of every client, and a worker speaks TLS"
)
_TOKEN_FILE = (
    "file with tokens, one a line: of a worker the first is its own; a server takes them all, also as "
    "WORKER-ID:TOKEN, which alone is good for that worker and for no other, and reads the file again when it "
    "changes"
)
_STATE = (
    "folder in which what this process has of its job outlives it: of a server checkpoints and a journal, "
    "with which one that is started again goes on, also after kill -9; of a worker, at the versions of the "
    "checkpoints, what the server has not, such as residuals. Or a URL that fsspec knows, such as "
    "s3://BUCKET/JOB: of a server checkpoints alone, with --durability none"
)
_SPEC = "NAME[:KEY=VALUE,...]"
_TASK = "TASK[:KEY=VALUE,...]"


def parse_task(text: str) -> Spec:
    """A built-in task, or `module:function`, with options; raise `SpecError` for other names."""
    spec = parse_spec("task", text, functions=True)
    module, colon, function = spec.name.partition(":")
    if colon and all(part.isidentifier() for part in (*module.split("."), function)):
        return spec
    if spec.name not in BUILT_IN_TASKS:
        raise SpecError(
            f"{unknown('task', spec.name, BUILT_IN_TASKS)}; your own is named module:function[:key=value,...]"
        )
    return spec


def parse_evaluate_every(text: str) -> Length:
    """Raises ValueError."""
    found = parse_length(text)
    if not found.number:
        raise ValueError(f"expected a length above 0, got {text!r}")
    return found


def parse_address(text: str) -> str:
    """host[:port] with the port filled in; IPv6 hosts with a port are written [host]:port.

    Raises:
        ValueError: anything else, such as a URL.
    """
    if "/" in text or any(c.isspace() for c in text) or text.count("[") != text.count("]"):
        raise ValueError(f"expected host or host:port, got {text!r}")
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]") or (":" in host and not host.endswith("]")):
        bare = f"[{text}]" if ":" in text and not text.startswith("[") else text
        return f"{bare}:{DEFAULT_PORT}"
    if not port.isdigit() or not 0 < int(port) < 65536 or not host:
        raise ValueError(f"expected host:port with a port from 1 to 65535, got {text!r}")
    return text


def _parse_host(text: str) -> None:
    """Names are left to the resolver; what can only be meant as an IP address has to be one."""
    try:
        if ":" in text:
            ipaddress.IPv6Address(text)
        elif text.replace(".", "").isdecimal():
            socket.inet_aton(text)  # 127.1 too
    except (ValueError, OSError):
        raise ValueError(f"expected an IP address without a port, or a name, got {text!r}") from None


def _parse_worker_id(text: str) -> None:
    if text and (why := why_no_name(text)):
        raise ValueError(why)


def names_in(text: str) -> tuple[str, ...]:
    """The parts of a list with commas."""
    return tuple(part for part in text.split(",") if part)


def _parse_modules(text: str) -> None:
    for name in names_in(text):
        if not all(part.isidentifier() for part in name.split(".")):
            raise ValueError(f"expected names of modules with commas between, got {name!r}")


@dataclass(frozen=True, kw_only=True)
class JobSettings:
    """What makes the job. Every worker is told."""

    task: str = training(
        "digits",
        "task to train: a built-in one, or module:function of your own; only workers import it",
        metavar=_TASK,
        parse=parse_task,
    )
    script: bool = training(
        False, "no task: the workers are scripts of your own, which call gradwire.connect"
    )
    mode: str = training(
        "sync", "mode, which says how pushes become versions; all of them are listed below", metavar=_SPEC
    )
    epochs: int = training(
        30,
        "passes over the training samples; 0 for as many as it takes until --max-steps or --max-seconds",
        least=0,
        most=_MAX_UINT32,
    )
    max_steps: int = training(
        0, "steps, which are versions of the parameters, after which the job ends; 0 for no limit", least=0
    )
    max_seconds: float = training(
        0.0,
        "time of training after which the job ends with the steps that have begun; 0 for no limit",
        unit="seconds",
        least=0,
    )
    early_stop: str = training(
        "",
        "metric without whose getting better the job ends, such as accuracy:patience=5,delta=0.001; patience "
        "is in evaluations, and of losses, errors and perplexities less is better",
        metavar=_SPEC,
    )
    evaluate_every: str = training(
        "1epoch",
        "length of training after which the parameters are evaluated, such as 2epochs, 500steps, 60s or 5min",
        metavar="LENGTH",
        parse=parse_evaluate_every,
    )
    batch_size: int = training(32, "samples per worker and step", least=1, most=_MAX_UINT32)
    seed: int = training(
        1, "seed for initial parameters, sample order and compressors", least=0, most=2**63 - 1
    )
    optimizer: str = training(
        "sgd",
        "optimizer: sgd, adam, adamw or adagrad, such as sgd:momentum=0.9,weight_decay=1e-4",
        metavar=_SPEC,
        parse=parse_optimizer,
    )
    learning_rate: float = training(0.1, "base learning rate", least=0)
    schedule: str = training(
        "constant",
        "schedule of the learning rate: constant, cosine, step or exponential, such as "
        "cosine:warmup=200steps,minimum=0.1",
        metavar=_SPEC,
    )
    clip_norm: float = training(
        0.0,
        "largest norm of the mean gradient of the whole model; a longer one is scaled down to it before the "
        "optimizer's step, which then waits for all of the gradient; 0 for no limit",
        least=0,
    )
    buffers: Literal["mean", "rank0", "local"] = training(
        "mean",
        "buffers, such as BatchNorm's statistics, that are evaluated and saved: their mean over the workers, "
        "by samples, those of the worker of lowest rank, or of the one that evaluates",
    )
    overlap: Literal["off", "backward", "both"] = connection(
        "backward",
        "what travels while workers compute: nothing, gradients during the backward pass, or with both also "
        "parts of the update while other gradients are still on their way, and the next forward pass begins "
        "before all of them are there",
    )
    downlink: str = compression(
        "auto",
        "compressor of the updates that go to the workers: auto, as the pushes came, none, or such as 4bit",
        metavar=_SPEC,
    )


@dataclass(frozen=True, kw_only=True)
class JobTerms(JobSettings):
    """The job as workers are told it.

    Attributes:
        id: unique per server start.
        work: kind of work that the mode asks of workers, as a spec: gradients, local or exchange.
    """

    id: str
    work: str


@dataclass(frozen=True, kw_only=True)
class ServingSettings:
    """What the server alone goes by."""

    aggregation: str = training(
        "mean", "aggregation of gradients: mean, median, trimmed or krum, such as krum:wrong=2", metavar=_SPEC
    )
    part_bytes: int = connection(
        0,
        "size of the largest part of the model that travels as one, as float32; 0 for a 32nd of the model, "
        "but at least 2 MiB, and more if the first worker sends a part of the elements only",
        unit="bytes",
        least=0,
    )
    fusion: str = connection(
        "bytes",
        "tensors that travel as one unit: none (each by itself), bytes (as many neighbours as a part holds) "
        "or bytes=N, mgwfbp, mgs or mgs=N (bytes as they are sent), seamgs; with the last three sparsifiers "
        "choose among all elements of a unit",
        metavar="NAME[=BYTES]",
    )
    order: str = connection(
        "fifo",
        "order in which parts travel that wait: fifo (as backward makes them), p3 (nearest the input first), "
        "credit or credit=N (p3 with at most N parts on their way), two-phase (as planned)",
        metavar="NAME[=PARTS]",
    )
    replan: str = connection(
        "100",
        "when fusion and order are planned anew from what was measured: every N versions, never after the "
        "first plans, or by drift, when times or the link have changed by a fifth",
        metavar="N|drift|never",
    )
    lease_seconds: float = connection(
        10.0, "time without a sign of life after which a worker is lost", unit="seconds", least=0.5
    )
    progress_seconds: float = connection(
        600.0,
        "time without progress of a worker's training thread after which its samples go to others; more "
        "where the same took long before; 0 for no limit",
        unit="seconds",
        least=0,
    )
    max_model_bytes: int = connection(
        16 << 30, "size of the largest model taken, as float32", unit="bytes", least=4
    )


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """What a worker alone goes by."""

    compressor: str = compression(
        "4bit", "compressor of gradients; auto for 4bit where it pays", metavar=_SPEC
    )
    dense_layers: str = compression(
        "", "parameters to send uncompressed: name patterns such as *.head.*,embed*", metavar="PATTERN,..."
    )
    compressed_layers: str = compression(
        "", "parameters to compress although they are small: name patterns", metavar="PATTERN,..."
    )
    device: Literal["auto", "cpu", "cuda"] = process(
        "auto", "device to compute on; auto takes CUDA if there is one"
    )
    connect_seconds: float = connection(
        120.0, "time to look for a server that is still starting", unit="seconds", least=0
    )
    give_up_seconds: float = connection(
        120.0, "time to try to come back after the connection broke", unit="seconds", least=0
    )
    leave_seconds: float = connection(
        20.0, "time to try to hand over what was not sent yet, when told to stop", unit="seconds", least=0
    )


@dataclass(frozen=True, kw_only=True)
class ProcessSettings:
    """What every daemon has, and gc-run decides for those that it starts."""

    threads: int = process(0, "CPU threads for numerics; 0 for one per core", least=0)
    http_port: int = process(9464, _HTTP_PORT, least=-1, most=65535)
    http_host: str = process(
        "",
        "address to serve /metrics, /livez and /readyz on; empty for this machine alone, or, on a server "
        "that remote peers may use, that of --host",
    )
    log_format: Literal["text", "json"] = process("text", "form of a log line")


@dataclass(frozen=True, kw_only=True)
class ServerSettings(ProcessSettings, ServingSettings, JobSettings):
    """Hold the parameters of a training job, aggregate the workers' gradients and apply the optimizer."""

    host: str = connection(
        "0.0.0.0",
        "address to listen on; peers of other machines are answered only with --tls-cert and --token-file or "
        "--tls-ca, or with --insecure",
        parse=_parse_host,
    )
    port: int = connection(DEFAULT_PORT, "gRPC port; 0 for a free one", least=0, most=65535)
    min_workers: int = training(1, "workers to wait for before the first round", least=1)
    insecure: bool = connection(
        False,
        "service for peers of other machines without encryption or without authentication, for networks that "
        "you trust",
    )
    reflection: bool = connection(
        False,
        "gRPC reflection, for tools such as grpcurl; whoever reaches the port may ask, without a token, too",
    )
    tls_cert: str = connection("", _TLS_CERT, metavar="FILE")
    tls_key: str = connection("", _TLS_KEY, metavar="FILE")
    tls_ca: str = connection("", _TLS_CA, metavar="FILE")
    token_file: str = connection("", _TOKEN_FILE, metavar="FILE")
    stay: bool = process(False, "service after the job is done, until told to stop")
    output: str = results("", "file for the final parameters, as safetensors", metavar="FILE")
    state: str = lasting("", _STATE, metavar="DIR|URL")
    resume: str = lasting(
        "",
        "file with which a new job begins, instead of its first worker's parameters: a state_dict as "
        "safetensors, such as --output, a checkpoint, or a folder of --state; a checkpoint's optimizer goes "
        "on as well if it is the same. Or the URL of one",
        metavar="FILE|DIR|URL",
    )
    durability: Literal["none", "journal", "fsync"] = lasting(
        "journal",
        "what an accepted push survives with --state: nothing before the next checkpoint (none), the end of "
        "the server's process (journal), or that of its machine, too (fsync)",
    )
    checkpoint_every: str = lasting(
        "10min",
        "length of training after which a checkpoint is written with --state, such as 1epoch, 500steps or "
        "10min; or earlier, when the journal has grown to eight checkpoints",
        metavar="LENGTH",
        parse=parse_evaluate_every,
    )
    keep: str = results(
        "",
        "best version, kept as NAME.best.safetensors beside --output, and in --state: best:METRIC, such as "
        "best:accuracy, has the largest value of all evaluations, or the smallest of a loss and the like; "
        "best:METRIC:min and best:METRIC:max say which",
        metavar="best:METRIC[:min|max]",
    )


@dataclass(frozen=True, kw_only=True)
class WorkerSettings(ProcessSettings, TrainingSettings):
    """Join a training job: compute gradients, compress them, push them to the server."""

    http_port: int = process(9465, _HTTP_PORT, least=-1, most=65535)
    server: str = connection(
        REQUIRED,
        f"address of the server; the port defaults to {DEFAULT_PORT}",
        metavar="HOST[:PORT]",
        parse=parse_address,
    )
    tls_cert: str = connection("", _TLS_CERT, metavar="FILE")
    tls_key: str = connection("", _TLS_KEY, metavar="FILE")
    tls_ca: str = connection("", _TLS_CA, metavar="FILE")
    token_file: str = connection("", _TOKEN_FILE, metavar="FILE")
    worker_id: str = connection(
        "",
        "name of this worker, unique in the job, of letters, digits, '.', '_' and '-'; empty for host name "
        "and process id",
        parse=_parse_worker_id,
    )
    state: str = lasting("", _STATE, metavar="DIR|URL")
    task: str = training(
        "",
        "task that this worker trains, and no other; empty for what the server names, if it is built in or "
        "of --allow-task",
        metavar=_TASK,
        parse=lambda text: parse_task(text) if text else None,
    )
    allow_task: str = training(
        "",
        "modules whose functions the server may name as the task",
        metavar="MODULE,...",
        parse=_parse_modules,
    )


def access_files(settings: WorkerSettings) -> dict[str, str]:
    """For TLS and a token, by name."""
    names = ("tls_ca", "tls_cert", "tls_key", "token_file")
    return {name: getattr(settings, name) for name in names}


@dataclass(frozen=True, kw_only=True)
class RunSettings(TrainingSettings, ServingSettings, JobSettings):
    """Train with one server and several workers on this machine, and compare with an uncompressed run."""

    workers: int = training(4, "worker processes", least=1)
    http_port: int = process(
        0,
        "port of the server's /metrics, with free ones for the workers; 0 for a free one, -1 for none at all",
        least=-1,
        most=65535,
    )
    baseline: bool = results(True, "second run without compression, to compare with")
    json: str = results("", "file for another copy of the report", metavar="FILE")
    out: str = results("", "directory for logs, report and plot; empty for a new one in runs/", metavar="DIR")


# By the dataclass of a command's options, whose docstring --help shows.
COMMANDS: Mapping[type[Any], str] = {
    ServerSettings: "gc-server",
    WorkerSettings: "gc-worker",
    RunSettings: "gc-run",
}
