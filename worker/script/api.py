"""The public API for scripts, `import gradwire`. This module imports torch and grpc; the package does not."""

from __future__ import annotations

import os
from typing import Any

# Before grpc is imported: gRPC must not handle a DataLoader's forks, and Gradwire logs every error itself.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import torch

from ...common.configuration import read
from ...compressors import set_threads
from ...settings import COMMANDS, WorkerSettings
from .job import Job
from .terms import ScriptError

__all__ = ["Job", "ScriptError", "connect"]


def connect(**options: Any) -> Job:
    """Join a job as a worker and return it. The server must have been started with `gc-server --script`.

    Args:
        options: options of gc-worker by name, such as server="host:50051" or compressor="topk:ratio=100".
            Other options come from `GC_` variables. Without an address there, torchrun's MASTER_ADDR is used.
            Metrics are served over HTTP only if `http_port` is given.

    Raises:
        UsageError: an option does not exist or does not accept its value.
        Refused: the server refuses this worker; the message says why.
        UnreachableError: no server has answered within `connect_seconds`.
        ScriptError: the job trains a task instead of scripts, or a script cannot do the work of its mode.
    """
    environ = {"GC_HTTP_PORT": "-1", **os.environ}
    if "MASTER_ADDR" in environ:
        environ.setdefault("GC_SERVER", environ["MASTER_ADDR"])
    given = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    effective = read(WorkerSettings, COMMANDS, argv=given, environ=environ)
    if threads := effective.settings.threads:
        torch.set_num_threads(threads)
        set_threads(threads)
    return Job(effective)
