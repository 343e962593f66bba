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


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
