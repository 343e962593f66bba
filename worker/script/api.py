"""The public API for scripts, `import gradwire`. This module imports torch and grpc; the package does not."""

from __future__ import annotations

import logging
import multiprocessing
import os
from typing import Any

# Before grpc is imported: gRPC must not handle a DataLoader's forks, and Gradwire logs every error itself.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import torch
from torch.utils.data import get_worker_info

from ...common.configuration import UsageError, read
from ...compressors import set_threads
from ...proto.refusal import Refused
from ...settings import COMMANDS, WorkerSettings
from ...storage.backends import BackendError
from ..session.attempts import UnreachableError
from ..session.model_state import ModelError
from .errors import show_in_one_line
from .job import Job
from .terms import JobFinished, ScriptError

log = logging.getLogger("gradwire.worker")

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


def connect(**options: Any) -> Job:
    """Join a job as a worker and return it. The server must have been started with `gc-server --script`.

    Args:
        options: options of gc-worker by name, such as server="host:50051" or compressor="topk:ratio=100".
            Other options come from `GC_` variables. Without an address there, torchrun's MASTER_ADDR is used.
            Metrics are served over HTTP only if `http_port` is given.

    Raises:
        UsageError: an option does not exist or does not accept its value.
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
    show_in_one_line()
    _check_process()
    environ = {"GC_HTTP_PORT": "-1", **os.environ}
    if "MASTER_ADDR" in environ:
        environ.setdefault("GC_SERVER", environ["MASTER_ADDR"])
    given = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    effective = read(WorkerSettings, COMMANDS, argv=given, environ=environ)
    if effective.foreign:
        log.warning("%s", effective.foreign)
    if threads := effective.settings.threads:
        torch.set_num_threads(threads)
        set_threads(threads)
    return Job(effective)


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
