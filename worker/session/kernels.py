"""Reports of a worker, in its log and to the server, while kernels are compiled."""

from __future__ import annotations

import logging
from functools import partial

from ...compressors import tell_of_compiling
from .connection import Connection

log = logging.getLogger("gradwire.worker")


def tell_of_kernels(connection: Connection, level: int = logging.INFO) -> None:
    """Report to the server, and log at this level, while kernels are compiled."""
    tell_of_compiling(partial(log.log, level), partial(setattr, connection, "activity"))
