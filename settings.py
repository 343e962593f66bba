"""Every option of gc-server, gc-worker and gc-run, declared once.

A field made with `option`, here under the name of its group, is an option. Its flag, `GC_` variable, key in a
file, lines of `--help` and `--print-config`, and row in docs/reference/commands.md (`make docs`) come from
it. The class decides which commands have it:

    JobSettings      gc-server, gc-run; workers receive it when they join (the message `Job`)
    ServingSettings  gc-server, gc-run
    TrainingSettings gc-worker, gc-run
    ServerSettings, WorkerSettings, RunSettings: that command alone

gc-run passes the options that it shares with a daemon on to it. To add an option, write its field and use it;
no other list needs a change. The options of a mode are in the mode's own file, as in `--mode stale:bound=4`.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from .common import plugins
from .common.configuration import REQUIRED, option
from .common.naming import why_no_name
from .common.presets import parse_preset, values_by_preset
from .common.spec import Length, Spec, SpecError, parse_length, parse_spec, unknown
from .optim.optimizer import parse_optimizer

DEFAULT_PORT = 50051
BUILT_IN_TASKS = ("digits", "characters", "cifar10", "cifar100", "mnist", "hyperspectral")

# Each declares an option in one group of --help.
training = partial(option, group="training")
compression = partial(option, group="compression")
connection = partial(option, group="connection")
process = partial(option, group="process")
results = partial(option, group="results")
lasting = partial(option, group="durability")

_MAX_UINT32 = 2**32 - 1
_HTTP_PORT = "port of /metrics, /livez and /readyz; 0 for a free one, -1 for none"
_TLS_CERT = "certificate of this process, as PEM; a server reloads it when the file changes"
_TLS_KEY = "private key of the --tls-cert certificate, as PEM"
_TLS_CA = (
    "certificates of the authorities that must have signed the peer's certificate, as PEM; makes a server "
    "require a certificate of every client, and makes a worker use TLS"
)
_TOKEN_FILE = (
    "file with tokens, one a line; a worker sends the first one; a server accepts all of them, a line "
    "WORKER-ID:TOKEN for that worker only, and reloads the file when it changes"
)
_STATE = (
    "folder from which this process resumes its job after a restart, also after kill -9. A server writes "
    "checkpoints and a journal; a worker writes its residuals and other state of its own at the version of "
    "each checkpoint. May be a URL that fsspec supports, such as s3://BUCKET/JOB; a server then needs "
    "--durability none and writes checkpoints only"
)
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


def parse_address(text: str) -> str:
    """Return an address as host:port, with port 50051 if `text` has none. An IPv6 host is written
    [host]:port.

    Raises:
        ValueError: `text` is not host or host:port, such as a URL.
    """
    scheme, slashes, rest = text.partition("://")
    if slashes:
        bare = rest.partition("/")[0] or "host:port"
        raise ValueError(f"expected host or host:port without {scheme}://, such as {bare}, got {text!r}")
    if "/" in text or any(c.isspace() for c in text):
        raise ValueError(f"expected host or host:port, got {text!r}")
    bracket, _, inside = text.rpartition("[")
    if bracket or "[" in text or "]" in text:
        host, closed, port = inside.partition("]")
        if bracket or not closed or port[:1] not in ("", ":"):
            raise ValueError(f"expected host, host:port or [IPv6 address]:port, got {text!r}")
        colon, port = port[:1], port[1:]
    elif text.count(":") > 1:
        host, colon, port = text, "", ""
    else:
        host, colon, port = text.partition(":")
    if not host or (colon and not (port.isascii() and port.isdigit() and 0 < int(port) < 65536)):
        raise ValueError(f"expected host:port with a port from 1 to 65535, got {text!r}")
    if ":" in host or "[" in text:
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            example = "expected host, host:port or an IPv6 address, as in [::1]:50051"
            raise ValueError(f"{example}, got {text!r}") from None
        host = f"[{host}]"
    return f"{host}:{port or DEFAULT_PORT}"


def _parse_host(text: str) -> None:
    """Raise ValueError if `text` looks like an IP address but is not one. Host names are not checked here."""
    try:
        if ":" in text:
            ipaddress.IPv6Address(text.removeprefix("[").removesuffix("]"))
        elif text.replace(".", "").isdecimal():
            socket.inet_aton(text)  # accepts short forms too, such as 127.1
    except (ValueError, OSError):
        raise ValueError(f"expected an IP address without a port, or a name, got {text!r}") from None


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
class JobSettings:
    """Options that define the job. The server sends them to every worker."""

    task: str = training(
        "digits",
        "task to train: built-in, such as digits, of an installed package, or module:function of your own; "
        "only workers import it",
        metavar=_TASK,
        parse=parse_task,
    )
    script: bool = training(
        False, "job without a task: its workers are your own scripts, which call gradwire.connect"
    )
    preset: str = training(
        "",
        "preset: settings that belong together, by name; a flag, variable or file entry overrides any of its "
        "values; presets are listed below",
        metavar="NAME",
        parse=parse_preset,
        sets=values_by_preset(),
    )
    mode: str = training(
        "sync",
        "mode, which decides when pushes become a new version of the parameters; modes are listed below",
        metavar=_SPEC,
    )
    epochs: int = training(
        30,
        "passes over the training samples; 0 for no limit other than --max-steps or --max-seconds",
        least=0,
        most=_MAX_UINT32,
    )
    max_steps: int = training(
        0, "number of steps (versions of the parameters) after which the job ends; 0 for no limit", least=0
    )
    max_seconds: float = training(
        0.0,
        "training time after which no step begins; the job ends with those begun; 0 for no limit",
        unit="seconds",
        least=0,
    )
    early_stop: str = training(
        "",
        "metric whose lack of improvement ends the job, such as accuracy:patience=5,delta=0.001: after 5 "
        "evaluations without an improvement above 0.001; lower is better for losses, errors and perplexities",
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
        "optimizer: sgd, adam, adamw or adagrad, such as sgd:momentum=0.9,weight_decay=1e-4; in mode local, "
        "whose workers step by it, also muon",
        metavar=_SPEC,
        parse=parse_optimizer,
    )
    learning_rate: float = training(0.1, "base learning rate", least=0)
    schedule: str = training(
        "constant",
        "schedule of the learning rate: constant, cosine, step or exponential, such as "
        "cosine:warmup=10%,minimum=0.1; lengths are epochs (2), steps (200steps; in mode local, local steps) "
        "or a part of the job (10%)",
        metavar=_SPEC,
    )
    clip_norm: float = training(
        0.0,
        "largest Euclidean norm of the whole model's mean gradient; a larger gradient is scaled down to it. "
        "The optimizer's step then waits until all parts of the gradient have arrived; 0 for no limit",
        least=0,
    )
    buffers: Literal["mean", "rank0", "local"] = training(
        "mean",
        "source of the buffers, such as BatchNorm's statistics, that are evaluated and saved: mean over the "
        "workers, weighted by samples; the worker of lowest rank (rank0); or the evaluating worker (local)",
    )
    overlap: Literal["off", "backward", "both"] = connection(
        "backward",
        "overlap of communication with computation: off for none; backward sends gradients during the "
        "backward pass; both also sends parts of an update before all gradients have arrived, and begins the "
        "next forward pass before all parts of the update have",
    )
    fusion: str = connection(
        "bytes",
        "rule that joins neighbouring tensors into units, which are compressed at once: none (a unit per "
        "tensor), bytes or bytes=N (up to the size of a part, or N), mgwfbp, mgs or mgs=N (N compressed "
        "bytes), seamgs; with the last three, sparsifiers select among all elements of a unit",
        metavar="NAME[=BYTES]",
    )
    compressor: str = compression(
        "4bit",
        "compressor of gradients, such as topk:ratio=100, for workers without a --compressor of their own; "
        "auto for 4bit where it saves time",
        metavar=_SPEC,
    )
    downlink: str = compression(
        "auto",
        "compressor of the updates sent to workers: auto (the encoding of most pushes), none (float32), or "
        "any that allows it, such as 4bit",
        metavar=_SPEC,
    )


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
        "aggregation of the workers' gradients: mean, median, trimmed or krum, such as krum:wrong=2",
        metavar=_SPEC,
    )
    part_bytes: int = connection(
        0,
        "largest size of a part, the piece of the model that is sent as one, as float32; 0 for 1/32 of the "
        "model, but at least 2 MiB, and more if the first worker's compressor is sparse",
        unit="bytes",
        least=0,
    )
    order: str = connection(
        "fifo",
        "order in which waiting parts are sent: fifo (as backward produces them), p3 (nearest the input "
        "first), credit or credit=N (p3 with at most N parts in flight), two-phase (as the planner decides)",
        metavar="NAME[=PARTS]",
    )
    replan: str = connection(
        "100",
        "when --fusion and --order are replanned from measurements: every N versions; drift, when times or "
        "the link's rate have changed by a fifth; or never after the first plans",
        metavar="N|drift|never",
    )
    lease_seconds: float = connection(
        10.0, "time without a message after which a worker counts as lost", unit="seconds", least=0.5
    )
    progress_seconds: float = connection(
        600.0,
        "time without progress of a worker's training thread after which its samples are given to other "
        "workers; longer if the same activity has taken long before; 0 for no limit",
        unit="seconds",
        least=0,
    )
    max_model_bytes: int = connection(
        16 << 30, "size of the largest model that is accepted, as float32", unit="bytes", least=4
    )


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """Options of a worker that gc-run passes to all of its workers."""

    dense_layers: str = compression(
        "",
        "name patterns of parameters to send uncompressed, such as *.head.*,embed*",
        metavar="PATTERN,...",
    )
    compressed_layers: str = compression(
        "",
        "name patterns of parameters to compress although they have fewer than two dimensions",
        metavar="PATTERN,...",
    )
    device: Literal["auto", "cpu", "cuda"] = process(
        "auto", "device to compute on; auto for CUDA if available, else the CPU"
    )
    connect_seconds: float = connection(
        120.0, "time in which to find the server, which may still be starting", unit="seconds", least=0
    )
    give_up_seconds: float = connection(
        120.0, "time in which to reconnect after the connection broke", unit="seconds", least=0
    )
    leave_seconds: float = connection(
        20.0,
        "time in which to push the residuals and leave after SIGTERM or SIGINT; 0 to leave at once",
        unit="seconds",
        least=0,
    )


@dataclass(frozen=True, kw_only=True)
class ProcessSettings:
    """Options of every daemon. gc-run sets them for the daemons that it starts."""

    threads: int = process(0, "CPU threads for computation; 0 for one per core", least=0)
    http_port: int = process(9464, _HTTP_PORT, least=-1, most=65535)
    http_host: str = process(
        "",
        "address for /metrics, /livez and /readyz; empty for this machine only, or, on a server that accepts "
        "remote peers, for the address of --host",
    )
    log_format: Literal["text", "json"] = process("text", "format of log lines")


@dataclass(frozen=True, kw_only=True)
class ServerSettings(ProcessSettings, ServingSettings, JobSettings):
    """Hold the parameters of a training job, aggregate the workers' gradients and apply the optimizer."""

    host: str = connection(
        "0.0.0.0",
        "address to listen on; other machines are served only with --tls-cert and --token-file or --tls-ca, "
        "or with --insecure",
        parse=_parse_host,
    )
    port: int = connection(DEFAULT_PORT, "gRPC port; 0 for a free one", least=0, most=65535)
    min_workers: int = training(1, "workers to wait for before the first round", least=1)
    insecure: bool = connection(
        False,
        "service for other machines without encryption or authentication; use it only on networks you trust",
    )
    reflection: bool = connection(
        False,
        "gRPC reflection, for tools such as grpcurl; every peer that reaches the port may use it, without a "
        "token",
    )
    tls_cert: str = connection("", _TLS_CERT, metavar="FILE")
    tls_key: str = connection("", _TLS_KEY, metavar="FILE")
    tls_ca: str = connection("", _TLS_CA, metavar="FILE")
    token_file: str = connection("", _TOKEN_FILE, metavar="FILE")
    stay: bool = process(False, "service after the job is done, until SIGTERM or SIGINT")
    output: str = results("", "file for the final parameters, as safetensors", metavar="FILE")
    state: str = lasting("", _STATE, metavar="DIR|URL")
    resume: str = lasting(
        "",
        "file, folder or URL whose parameters a new job starts from, instead of its first worker's: a "
        "state_dict as safetensors, such as --output, a checkpoint, or a folder of --state; a checkpoint's "
        "optimizer state is used too if the optimizer is the same",
        metavar="FILE|DIR|URL",
    )
    durability: Literal["none", "journal", "fsync"] = lasting(
        "journal",
        "crashes that an accepted push survives with --state: none before the next checkpoint (none), those "
        "of the server's process (journal), or those of its machine too (fsync)",
    )
    checkpoint_every: str = lasting(
        "10min",
        "length of training between two checkpoints with --state, such as 1epoch, 500steps or 10min; shorter "
        "when the journal has reached the size of eight checkpoints",
        metavar="LENGTH",
        parse=parse_evaluate_every,
    )
    keep: str = results(
        "",
        "metric, as best:METRIC, by which the best version is kept, as NAME.best.safetensors beside --output "
        "and in --state. The largest value is best, of losses, errors and perplexities the smallest; "
        "best:METRIC:min and best:METRIC:max choose explicitly",
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
        "name of this worker, unique in the job, made of letters, digits, '.', '_' and '-'; empty for host "
        "name, process id and six random digits",
        parse=_parse_worker_id,
    )
    state: str = lasting("", _STATE, metavar="DIR|URL")
    compressor: str = compression(
        "",
        "compressor of gradients, such as topk:ratio=100; auto for 4bit where it saves time; empty for the "
        "one that the server names",
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
        "only task that this worker trains; empty for the task that the server names, if it is built in or "
        "allowed by --allow-task",
        metavar=_TASK,
        parse=lambda text: parse_task(text) if text else None,
    )
    allow_task: str = training(
        "",
        "modules whose functions this worker runs as a task if the server names them, and names of other "
        "packages' tasks",
        metavar="MODULE,...",
        parse=_parse_modules,
    )


def access_files(settings: WorkerSettings) -> dict[str, str]:
    """Return the paths of the worker's TLS and token files by option name, such as "tls_ca"; empty text for a
    file that was not given."""
    names = ("tls_ca", "tls_cert", "tls_key", "token_file")
    return {name: getattr(settings, name) for name in names}


@dataclass(frozen=True, kw_only=True)
class RunSettings(TrainingSettings, ServingSettings, JobSettings):
    """Train with one server and several workers on this machine, and compare with an uncompressed run."""

    workers: int = training(4, "worker processes", least=1)
    http_port: int = process(
        0,
        "port of the server's /metrics; 0 for a free one, -1 for none, also at the workers, which else use "
        "free ones",
        least=-1,
        most=65535,
    )
    baseline: bool = results(True, "second run without compression, for comparison")
    json: str = results("", "file for an additional copy of the report, as JSON", metavar="FILE")
    out: str = results("", "folder for logs, report and plot; empty for a new one in runs/", metavar="DIR")


# Name of each command by the dataclass of its options. --help shows the docstring of that class.
COMMANDS: Mapping[type[Any], str] = {
    ServerSettings: "gc-server",
    WorkerSettings: "gc-worker",
    RunSettings: "gc-run",
}
