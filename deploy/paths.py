"""Where a run's files go. What cannot be written is said before hours of training, not after."""

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
    """The directory for everything that a run leaves, made at once; if for nothing, it is removed again.

    Raises:
        UsageError: no files can be made there.
    """
    if settings.out:
        path = Path(settings.out)
        made = [] if path.exists() else [path]
        try:
            path.mkdir(parents=True, exist_ok=True)
            _try_to_write(path)
        except OSError as error:
            raise UsageError(
                f"--out {path}: {error.strerror}; expected a directory to write to, or where one can be made"
            ) from None
    else:
        path = _make_new(f"{settings.task} {settings.compressor}")
        made = [path, RUNS]
    try:
        yield path
    finally:
        with contextlib.suppress(OSError):  # it is not empty, as it should be
            for directory in made:
                directory.rmdir()


def _make_new(label: str) -> Path:
    """A directory in `RUNS` that no other run has, though it may have begun in the same second."""
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
    """Where else the report goes; None if nobody asked.

    Raises:
        UsageError: no file can be made there.
    """
    if not settings.json:
        return None
    path = Path(settings.json)
    why = "it is there, and not a file" if path.exists() and not path.is_file() else ""
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
    """Raise OSError if no file can be made there. Permissions alone do not tell: a disk may be read-only."""
    with tempfile.TemporaryFile(dir=directory):
        pass
