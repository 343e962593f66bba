"""Which machine this is: processes that are on the same one share its cores."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def name() -> str:
    """The same for all processes of a machine, in containers and namespaces of it too, and no other's."""
    try:
        return _BOOT.read_text().strip()
    except OSError:  # not Linux
        return f"{uuid.getnode():012x}"


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
