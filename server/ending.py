"""How a server ends: where the last parameters go if they cannot go where they should, and the exit code."""

from __future__ import annotations

import logging
import signal
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

from ..exits import Exit

log = logging.getLogger("gradwire.server")


async def written(path: Path, version: int, save: Callable[[Path], Awaitable[None]]) -> bool:
    """Save the parameters in a file, or, where that fails, in the folder for temporary files, so that they
    are not lost to a disk that is full. Returns whether they are where they belong."""
    elsewhere = Path(tempfile.gettempdir()) / path.name
    for file in (path, elsewhere):
        try:
            await save(file)
        except Exception as error:
            log.error("the parameters could not be saved as %s: %s", file, error)
            continue
        level = logging.INFO if file == path else logging.ERROR
        log.log(level, "parameters of version %d written to %s", version, file)
        return file == path
    return False


def exit_code(
    *,
    finished: bool,
    received: signal.Signals | None,
    failed: bool,
    diverged: bool,
    unsaved: bool,
    unwritten: bool = False,
) -> int:
    """Of a server that has ended in order. What went wrong decides; that it was told to stop comes last.

    Args:
        finished: the job was.
        received: the signal that told it to stop.
        failed: the job could not go on; diverged: because its parameters are not finite.
        unwritten: because what it promises to write down cannot be written.
        unsaved: the last parameters are not where they were to be written.
    """
    if failed and not finished and not unwritten:
        return Exit.DIVERGED if diverged else Exit.INTERNAL
    if unsaved or unwritten:
        return Exit.UNWRITTEN
    if finished or received is None:
        return Exit.DONE
    return 128 + received
