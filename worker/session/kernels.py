"""Reports that kernels are being compiled, in the worker's log and in its heartbeats."""

from __future__ import annotations

import logging
from functools import partial

from ...compressors import tell_of_compiling
from .connection import Connection

log = logging.getLogger("gradwire.worker")


def tell_of_kernels(connection: Connection, level: int = logging.INFO) -> None:
    """Log the first compilation of a kernel, and report each as the worker's activity, from now on."""
    tell_of_compiling(partial(log.log, level), partial(setattr, connection, "activity"))
