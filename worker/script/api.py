"""The public API for scripts, `import gradwire`. This module imports torch and grpc; the package does not."""

from __future__ import annotations

import logging
import multiprocessing
import os
from pathlib import Path

# Before grpc is imported: gRPC must not handle a DataLoader's forks, and Gradwire logs every error itself.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import torch
from torch.utils.data import get_worker_info

from ...common.configuration import UsageError, read
from ...common.one_line import show_in_one_line
from ...compressors import set_threads
from ...proto.refusal import Refused
from ...settings import COMMANDS, WorkerSettings
from ...storage.backends import BackendError
from ..session.attempts import UnreachableError
from ..session.model_state import ModelError
from .job import Job
from .terms import JobFinished, ScriptError

log = logging.getLogger("gradwire.worker")

ERRORS = (BackendError, ModelError, Refused, ScriptError, UnreachableError, UsageError)

# The exceptions that a script may have to handle, besides those of its own code, have their names here.
__all__ = [
    "BackendError",
    "Job",
    "JobFinished",
    "ModelError",
    "Refused",
    "ScriptError",
    "UnreachableError",
    "UsageError",
    "connect",
]


def connect(
    server: str | None = None,
    *,
    worker_id: str | None = None,
    compressor: str | None = None,
    preset: str | None = None,
    dense_layers: str | None = None,
    compressed_layers: str | None = None,
    state: str | Path | None = None,
    token_file: str | Path | None = None,
    tls_ca: str | Path | None = None,
    tls_cert: str | Path | None = None,
    tls_key: str | Path | None = None,
    connect_seconds: float | None = None,
    give_up_seconds: float | None = None,
    leave_seconds: float | None = None,
    threads: int | None = None,
    http_port: int | None = None,
    http_host: str | None = None,
) -> Job:
    """Join a job as a worker and return it. The server must have been started with `gc-server --script`.

    Each argument is the option of gc-worker with its name. One that is None comes from its `GC_` variable,
    such as GC_COMPRESSOR, else it has the option's default.

    Args:
        server: address of the server, such as "host:50051". Without one, and without GC_SERVER, torchrun's
            MASTER_ADDR is used.
        worker_id: name of this worker, unique in the job.
        compressor: compressor of gradients, such as "topk:ratio=100", in place of the server's choice.
        preset: only preset whose jobs this worker joins.
        dense_layers, compressed_layers: name patterns of parameters that are never, or always, compressed.
        state: folder or URL from which this worker resumes after a restart; it needs a `worker_id`.
        token_file, tls_ca, tls_cert, tls_key: files for access to a server that asks for it.
        connect_seconds, give_up_seconds: seconds in which to find the server, and to find it again.
        leave_seconds: seconds in which to push the residual after SIGTERM.
        threads: number of CPU threads for computation; 0 for one per core.
        http_port, http_host: address of /metrics and of probes; without `http_port` there are none.

    Raises:
        UsageError: an option does not accept its value, or no server is named.
        JobFinished: the job has ended. Without a handler the script ends with exit code 0.
        Refused: the server refuses this worker; the message says why.
        UnreachableError: no server has answered within `connect_seconds`.
        ScriptError: the job trains a task instead of scripts, or a script cannot do the work of its mode; or
            this process only imports the script, as a loader's process does.

    Example:
        >>> job = gradwire.connect(compressor="topk:ratio=10", worker_id="w0")  # GC_SERVER names the server
        >>> job.version
        0
        >>> job.leave()
    """
    given = {name: value for name, value in locals().items() if value is not None}
    show_in_one_line(*ERRORS)
    _check_process()
    environ = {"GC_HTTP_PORT": "-1", **os.environ}
    if "MASTER_ADDR" in environ:
        environ.setdefault("GC_SERVER", environ["MASTER_ADDR"])
    if not (server or environ.get("GC_SERVER") or environ.get("GC_CONFIG")):
        raise UsageError(
            "gradwire.connect: no server is named; pass its address, as in gradwire.connect('host:50051'), "
            "or set the variable GC_SERVER; gc-run --script does so, and starts a server"
        )
    arguments = {name: str(value) if isinstance(value, Path) else value for name, value in given.items()}
    effective = read(WorkerSettings, COMMANDS, argv=(), environ=environ, arguments=arguments)
    if effective.foreign:
        log.warning("%s", effective.foreign)
    if own := effective.settings.threads:
        torch.set_num_threads(own)
        set_threads(own)
    try:
        return Job(effective)
    except KeyboardInterrupt:
        raise KeyboardInterrupt from None  # without the frames of the wait for the server


def _check_process() -> None:
    """Raise ScriptError in a DataLoader's process, and in a child of multiprocessing that still imports the
    script. A function that such a child runs later may connect, as with a launcher of ranks."""
    # The attribute by which multiprocessing refuses to start processes in such a child.
    importing = getattr(multiprocessing.current_process(), "_inheriting", False)
    if importing or get_worker_info() is not None:
        does = "is starting and imports the script again" if importing else "fetches samples"
        raise ScriptError(
            f"gradwire.connect: this process (pid {os.getpid()}), a child of the script's, {does}; it would "
            "join the job as another worker. Put connect, and all that the script runs, under "
            "if __name__ == '__main__':"
        )
