"""The fields of stored classes are a part of the format of checkpoints and journal."""

from __future__ import annotations

import hashlib
import importlib
import pkgutil
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import gradwire.coded
import gradwire.compressors
import gradwire.server
import gradwire.worker
from gradwire.common import stored
from gradwire.server.durable import journal
from gradwire.storage import checkpoint


def written(kind: Any) -> list[str]:
    """The names that a file has of a class."""
    if is_dataclass(kind):
        return [each.name for each in fields(kind) if each.metadata.get("saved", True)]
    return [each.name for each in kind] if issubclass(kind, Enum) else list(kind._fields)


def test_a_changed_field_counts_up_the_formats() -> None:
    for room in (gradwire.coded, gradwire.compressors, gradwire.server, gradwire.worker):
        for module in pkgutil.walk_packages(room.__path__, f"{room.__name__}."):
            if ".kernels." not in module.name and not module.name.endswith("__main__"):
                importlib.import_module(module.name)  # which registers its classes
    registered: dict[str, type] = vars(stored)["_classes"]
    ours = {name: kind for name, kind in registered.items() if kind.__module__.startswith("gradwire.")}
    lines = [f"{name}: {' '.join(written(kind))}" for name, kind in sorted(ours.items())]
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
    assert (checkpoint.FORMAT, journal.MAGIC, digest) == (11, b"GWJB", "65b3fa928212365b"), (
        "stored classes have other fields than files of these formats: count up checkpoint.FORMAT and "
        "journal.MAGIC, and enter all three here"
    )
