"""File descriptors of this process: every connection takes one, and nothing works without."""

from __future__ import annotations

import os
import resource

ENOUGH = 1 << 16  # some programs become slow where there may be far more
RESERVED = 256  # for files, probes and the process itself


def raise_limit() -> int:
    """Raise the soft limit of open files as far as the process may, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return ENOUGH if soft == resource.RLIM_INFINITY else soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):  # macOS has a lower limit of its own
        return soft
    return wanted


def most_connections(limit: int) -> int:
    """Return the number of connections that leave enough of a limit of open files for all else."""
    return max(limit - RESERVED, limit // 2)


def in_use() -> int:
    """Return the number of open descriptors; 0 if the system does not tell."""
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 0
