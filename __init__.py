"""Gradwire: a parameter server and workers that train PyTorch models over ordinary networks.

The rooms of the package and the direction in which they may import each other are drawn in
ARCHITECTURE.md. Importing this module is cheap: it imports neither torch nor grpc.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .common.version import __version__

if TYPE_CHECKING:
    from .common.spec import SpecError
    from .compressors import NonFiniteGradient, PayloadError
    from .ddp import RankLost, RanksDisagree
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
    "NonFiniteGradient",
    "PayloadError",
    "RankLost",
    "RanksDisagree",
    "Refused",
    "ScriptError",
    "SpecError",
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
_ROOMS = "compressors", "ddp", "optim"
# The modules of the names that are not of `.worker.script.api`, which imports torch and grpc.
_MODULES = {
    "NonFiniteGradient": ".compressors",
    "PayloadError": ".compressors",
    "RankLost": ".ddp",
    "RanksDisagree": ".ddp",
    "SpecError": ".common.spec",
} | dict.fromkeys(("Task", "TaskError", "TaskSpecError", "load_task", "parse_split"), ".worker.tasks")


def __getattr__(name: str) -> Any:
    """Import a member of the public API on first access and return it.

    Raises:
        AttributeError: `name` is not in the public API.
    """
    if name in _ROOMS:
        return import_module(f".{name}", __name__)
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES.get(name, ".worker.script.api"), __name__), name)


def __dir__() -> list[str]:
    return [*__all__, *_ROOMS]
