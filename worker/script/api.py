"""The public API, `import gradwire`, for scripts. Torch and grpc are imported here, not before."""

from __future__ import annotations

import os
from typing import Any

# Before grpc is imported: a DataLoader's workers are forked, and what goes wrong is in our own messages.
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
    """Become a worker of a job: of a server that was started with `gc-server --script`.

    Args:
        options: those of gc-worker by name, such as server="host:50051" or compressor="topk:ratio=100". What
            is not given comes from `GC_` variables, and the server's address then from torchrun's
            MASTER_ADDR. There are no metrics over HTTP unless `http_port` says where.

    Raises:
        UsageError: an option that there is not, or a value that it does not take.
        Refused: the server does not want this worker; the message says why.
        UnreachableError: no server has answered for `connect_seconds`.
        ScriptError: the job is not one of scripts, or its mode cannot be driven by one.
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
