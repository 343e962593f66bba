"""A user's script as the workers of gc-run: its command, its environment, and the words for its end.

The rule for scripts: the run ends with the first script that fails before the job is done. A script that
ends without an error leaves the job, and the others continue.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..common.configuration import UsageError, options_of, shared
from ..compressors import compressor_of
from ..proto.messages import MemberStatus, StatusResponse
from ..settings import RunSettings, WorkerSettings
from .daemons import at
from .processes import SHOWN_LOG_LINES, Child

SHOWN_TRACEBACK_LINES = 60
CONTRADICTION = (
    "--compressor {}: {} uses {}, which its script has named: leave compressor= out of gradwire.connect, or "
    "name the same one; with --baseline leave it out"
)
CALLS = "a script has to call gradwire.connect() and job.attach, and to loop over job.epochs()"


def command_of(settings: RunSettings, environ: Mapping[str, str]) -> list[str]:
    """Return the arguments of the command of --script, the first of which is the path of a program. `environ`
    are gc-run's variables.

    Raises:
        UsageError: the program does not exist, or cannot be run.
    """
    name, *arguments = shlex.split(settings.script)
    program = shutil.which(name, path=_path(environ))
    if program is None:
        why = "a file that is not a program" if Path(name).is_file() else "no program of this name"
        raise UsageError(
            f"--script {settings.script!r}: {name} is {why}; name the interpreter first, as in "
            "--script 'python train.py'"
        )
    return [program, *arguments]


def _path(environ: Mapping[str, str]) -> str:
    """Return the PATH of a script. Where no environment is active, `python` is that of gc-run."""
    path = environ.get("PATH", os.defpath)
    if environ.get("VIRTUAL_ENV") or environ.get("CONDA_PREFIX"):
        return path
    return os.pathsep.join([os.path.dirname(sys.executable), path])


def script_environ(
    settings: RunSettings, port: int, index: int, environ: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables of worker number `index` for a run with a server at `port`, and those of gc-run.

    They have every option of a worker, so that no other variable or file changes one. `gradwire.connect`
    reads them; its own arguments take precedence.
    """
    values: dict[str, Any] = {
        **shared(WorkerSettings, settings),
        # A script has the server's compressor, unless it names another one, and is no task.
        **dict.fromkeys(("compressor", "preset", "task"), ""),
        "server": at(port),
        "worker_id": f"worker-{index}",
        "threads": 1,  # all processes share this machine's cores
        "http_port": -1,
    }
    worker = WorkerSettings(**values)
    own = {each.variable: str(getattr(worker, name)) for name, each in options_of(WorkerSettings).items()}
    # The end of a log must not be lost with a script that is killed.
    return {**environ, "PATH": _path(environ), "PYTHONUNBUFFERED": "1", **own}


def joined(status: StatusResponse) -> dict[str, MemberStatus]:
    """Return the members that have joined so far, by the ids of their workers."""
    return {member.worker: member for member in (*status.departed, *status.members)}


def other_compressor(settings: RunSettings, status: StatusResponse) -> MemberStatus | None:
    """Return a member whose script has named another compressor than the run; None if there is none."""
    usual = str(compressor_of(settings.compressor)[0])
    return next((member for member in joined(status).values() if member.compressor != usual), None)


def with_own_compressor(settings: RunSettings, status: StatusResponse) -> RunSettings:
    """Return the settings of a run with the compressor that its script has named, if there is one."""
    other = other_compressor(settings, status)
    return settings if other is None else dataclasses.replace(settings, compressor=other.compressor)


def failure_of(child: Child, place: str) -> str:
    """Return a message that tells how a script has failed, with its traceback.

    `place` says where the job was: the worker's rank, and the epoch and version, as far as known.
    """
    code = child.code or 0
    ending = f"exit code {code}" if code > 0 else child.ending  # a script has no codes of ours
    lines = child.last_lines(SHOWN_TRACEBACK_LINES).splitlines()
    start = next((at for at, line in enumerate(lines) if line.startswith("Traceback ")), -SHOWN_LOG_LINES)
    said = "".join(f"\n    {line}" for line in lines[start:]) or " it is empty"
    return f"{child.name}{place} has failed: {ending}; the end of {child.log}:{said}"
