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

__all__ = [
    "BackendError",
    "Job",
    "JobFinished",
    "ModelError",
    "Refused",
    "ScriptError",
    "UnreachableError",
    "UsageError",
    "__version__",
    "connect",
]


def __getattr__(name: str) -> Any:
    """Import a member of the public API on first access and return it; its import loads torch and grpc.

    Raises:
        AttributeError: `name` is not in the public API.
    """
    if name in ("ddp", "optim"):
        return import_module(f".{name}", __name__)
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .worker.script import api

    return getattr(api, name)
