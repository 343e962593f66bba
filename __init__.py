"""Gradwire: a parameter server and workers that train PyTorch models over ordinary networks.

The rooms of the package and the direction in which they may import each other are drawn in
ARCHITECTURE.md. Importing this module is cheap: it imports neither torch nor grpc.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .common.version import __version__

if TYPE_CHECKING:
    from .worker.script.api import (
        BackendError,
        Job,
        JobFinished,
        ModelError,
        Refused,
        ScriptError,
        UnreachableError,
        UsageError,
        connect,
    )
    from .worker.tasks import Task, TaskError, TaskSpecError, load_task, parse_split

__all__ = [
    "BackendError",
    "Job",
    "JobFinished",
    "ModelError",
    "Refused",
    "ScriptError",
    "Task",
    "TaskError",
    "TaskSpecError",
    "UnreachableError",
    "UsageError",
    "__version__",
    "connect",
    "load_task",
    "parse_split",
]
_OF_TASKS = ("Task", "TaskError", "TaskSpecError", "load_task", "parse_split")  # torch stays unimported


def __getattr__(name: str) -> Any:
    """Import a member of the public API on first access; those of scripts load torch and grpc.

    Raises:
        AttributeError: `name` is not in the public API.
    """
    if name in ("ddp", "optim"):
        return import_module(f".{name}", __name__)
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(
        import_module(".worker.tasks" if name in _OF_TASKS else ".worker.script.api", __name__), name
    )
