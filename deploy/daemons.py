"""The command lines of the daemons that gc-run starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from .. import __version__
from ..options import UsageError, resolve
from ..server.config import ServerConfig, check_together
from ..worker.config import WorkerConfig
from .config import RunOptions

HOST = "127.0.0.1"

# Options of gc-run that are the server's.
_OF_THE_SERVER = tuple(
    field.name
    for field in dataclasses.fields(RunOptions)
    if field.name in {of_server.name for of_server in dataclasses.fields(ServerConfig)}
)

# Both daemons share this machine's cores with each other, and their logs are read by people.
_COMMON = ("--http-port=0", "--log-format=text", "--threads=1")


def server_arguments(options: RunOptions, port: int, output: Path) -> list[str]:
    """Of gc-server.

    output: for the final parameters. A flag of its own, because GC_OUTPUT reaches every server of a
        comparison, and the last one would overwrite what the first one wrote.
    """
    return [
        *_COMMON,
        f"--host={HOST}",
        f"--port={port}",
        f"--min-workers={options.workers}",
        "--stay",  # until gc-run has asked what the job came to, on a machine however busy
        *(f"--{name.replace('_', '-')}={getattr(options, name)}" for name in _OF_THE_SERVER),
        f"--output={output}",
    ]


def worker_arguments(options: RunOptions, port: int, index: int) -> list[str]:
    """Of the gc-worker with this index, from 0."""
    return [
        *_COMMON,
        f"--server={HOST}:{port}",
        f"--worker-id=worker-{index}",
        f"--compressor={options.compressor}",
    ]


def check_daemon_options(options: RunOptions, environ: Mapping[str, str]) -> None:
    """Read the command lines as the daemons will, so that what they would not take is said before they start.

    Raises:
        UsageError: from the daemon's own rules; gc-run's options have the names of theirs.
    """
    if options.mode == "coded" and options.compressor != "none":
        raise UsageError(
            f"--compressor {options.compressor}: --mode coded exchanges gradients in fixed point; use none"
        )
    if options.mode == "coded" and options.redundancy.isdigit():
        most = max(1, options.workers - 1)
        if int(options.redundancy) > most:
            given = f"--redundancy {options.redundancy}: in coded mode"
            raise UsageError(f"{given} --workers {options.workers} allows up to {most}")
    server = server_arguments(options, port=0, output=Path("parameters"))
    worker = worker_arguments(options, port=1, index=0)
    asked = resolve(
        ServerConfig, prog="gc-server", description="", argv=server, environ=environ, version=__version__
    )
    try:
        check_together(asked.config)
    except UsageError as error:  # what --workers becomes
        raise UsageError(str(error).replace("--min-workers", "--workers")) from None
    resolve(WorkerConfig, prog="gc-worker", description="", argv=worker, environ=environ, version=__version__)
