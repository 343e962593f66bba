"""Folders and files that a run writes, made or checked before the training starts."""

from __future__ import annotations

import contextlib
import re
import tempfile
import time
from collections.abc import Generator
from pathlib import Path

from ..common.configuration import UsageError
from ..settings import RunSettings

RUNS = Path("runs")


@contextlib.contextmanager
def run_directory(settings: RunSettings) -> Generator[Path]:
    """Make the directory for a run's files and yield it, in a with block; remove it if it stays empty.

    It is the directory of --out, else a new one in `RUNS`.

    Raises:
        UsageError: if the directory cannot be made or written to.
    """
    if settings.out:
        path = Path(settings.out)
        made = [] if path.exists() else [path]
        try:
            path.mkdir(parents=True, exist_ok=True)
            _try_to_write(path)
        except OSError as error:
            raise UsageError(
                f"--out {path}: {error.strerror}; expected a writable directory, which may be a new one"
            ) from None
    else:
        path = _make_new(f"{settings.script[:40] or settings.task} {settings.compressor}")
        made = [path, RUNS]
    try:
        yield path
    finally:
        with contextlib.suppress(OSError):  # fails if it is not empty
            for directory in made:
                directory.rmdir()


def _make_new(label: str) -> Path:
    """Make a new directory in `RUNS` and return it.

    Its name ends with a number if another run started in the same second.
    """
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{re.sub(r'[^A-Za-z0-9]+', '-', label)}"
    path, number = RUNS / name, 1
    while True:
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            number += 1
            path = RUNS / f"{name}-{number}"
        except OSError as error:
            raise UsageError(
                f"{path} cannot be made: {error.strerror}; name another directory with --out"
            ) from None


def json_path(settings: RunSettings) -> Path | None:
    """Return the file of --json; None if the option is not given.

    Raises:
        UsageError: if the file cannot be written.
    """
    if not settings.json:
        return None
    path = Path(settings.json)
    why = "it exists and is not a file" if path.exists() and not path.is_file() else ""
    try:
        _try_to_write(path.parent)
    except OSError as error:
        why = str(error.strerror)
    if why:
        raise UsageError(
            f"--json {path}: {why}; expected a file in a directory that exists and can be written to"
        )
    return path


def _try_to_write(directory: Path) -> None:
    """Raise OSError unless a file can be made in `directory`.

    Permissions do not suffice: a disk may be read-only.
    """
    with tempfile.TemporaryFile(dir=directory):
        pass
