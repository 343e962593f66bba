"""The command lines of the daemons that gc-run starts, and its check of options that depend on each other."""

from __future__ import annotations

import functools
import socket
from pathlib import Path
from typing import Any

from ..common.addresses import listening_addresses
from ..common.configuration import UsageError, options_of, shared
from ..common.spec import parse_spec
from ..server import checks
from ..server.job.modes import registry
from ..settings import RunSettings, ServerSettings, WorkerSettings, parse_task


@functools.cache
def loopback() -> str:
    """Return the address of this machine for itself: 127.0.0.1, or ::1 where there is no IPv4."""
    return listening_addresses("")[0]


def listening_on(port: int) -> socket.socket:
    """Return a socket that listens on a port of this machine; 0 for a free one."""
    family = socket.AF_INET6 if ":" in loopback() else socket.AF_INET
    return socket.create_server((loopback(), port), family=family)


def free_port() -> int:
    """Return a TCP port of this machine that is free at this moment."""
    with listening_on(0) as listener:
        return int(listener.getsockname()[1])


def at(port: int) -> str:
    """Return host:port of a process of this machine."""
    return f"[{loopback()}]:{port}" if ":" in loopback() else f"{loopback()}:{port}"


# One thread each, because all daemons share this machine's cores; text, because people read their logs.
_COMMON: dict[str, Any] = {"log_format": "text", "threads": 1}


def server_arguments(settings: RunSettings, port: int, output: Path) -> list[str]:
    """Return the command-line arguments of gc-server for a run: its port, 0 for a free one, and the file for
    the final parameters."""
    return _arguments(_server_settings(settings, port, output))


def worker_arguments(settings: RunSettings, port: int, index: int) -> list[str]:
    """Return the command-line arguments of worker number `index` for a run with a server at `port`."""
    own: dict[str, Any] = {
        "server": at(port),
        "worker_id": f"worker-{index}",
        "http_port": min(0, settings.http_port),  # the given port is the server's
    }
    return _arguments(WorkerSettings(**{**shared(WorkerSettings, settings), **_COMMON, **own}))


def check_together(settings: RunSettings) -> None:
    """Raise UsageError for options that conflict with each other or with the number of workers."""
    checks.check_lossless(settings)
    registry.parse(settings.mode).check_workers(settings.mode, settings.workers)
    task, mode = parse_task(settings.task), parse_spec("mode", settings.mode)
    if ":" not in task.name and "split" in task.options:
        for name, option, alone in (("coded", "redundancy", "1"), ("sync", "stragglers", "0")):
            if mode.name == name and mode.options.get(option, alone) != alone:
                raise UsageError(
                    f"--task {settings.task}: not with --mode {settings.mode}: with split each worker has "
                    f"samples of its own, and with {option} several workers compute the same ones; leave out "
                    "split, or choose another mode"
                )
    try:
        checks.check(_server_settings(settings, port=0, output=Path("parameters")))
    except UsageError as error:  # gc-run's --workers is the server's --min-workers
        raise UsageError(str(error).replace("--min-workers", "--workers")) from None


def _server_settings(settings: RunSettings, port: int, output: Path) -> ServerSettings:
    """Return the server's settings for a run: those that gc-run shares with it, and fixed ones."""
    return ServerSettings(
        **{**shared(ServerSettings, settings), "script": bool(settings.script)},
        **_COMMON,
        stay=True,  # gc-run reads the final status before it stops the server
        host=loopback(),
        port=port,
        min_workers=settings.workers,
        output=str(output),
    )


def _arguments(settings: ServerSettings | WorkerSettings) -> list[str]:
    """Return every option of a daemon as an argument, so that no variable or file changes one."""
    found: list[str] = []
    cls: type[Any] = type(settings)
    for name, each in options_of(cls).items():
        value = getattr(settings, name)
        if name == "task" and isinstance(settings, ServerSettings) and settings.script:
            continue  # scripts bring the model
        if each.kind is bool:
            found.append(each.flag if value else each.flag.replace("--", "--no-", 1))
        else:
            found.append(f"{each.flag}={value}")
    return found
