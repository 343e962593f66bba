"""The identity of this machine, whose processes share its cores."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def name() -> str:
    """Return an identifier of this machine, the same in all of its processes and containers, and on no other
    machine."""
    try:
        return _BOOT.read_text(encoding="utf-8").strip()
    except OSError:  # not Linux
        return f"{uuid.getnode():012x}"


def core_numbers() -> list[int]:
    """Return the cores that this process may use, ascending; all where the system cannot bind processes."""
    bound = hasattr(os, "sched_getaffinity")
    return sorted(os.sched_getaffinity(0)) if bound else [*range(os.cpu_count() or 1)]


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(core_numbers())
