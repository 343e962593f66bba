"""The files of --output: the last parameters, and beside them those of the best version."""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

from ..shard.model_state import ModelState, complete
from ..shard.shard import Shard
from ..shard.writing import write_model
from .best import BestCheckpoint, BestFile
from .recorder import Recorder

log = logging.getLogger("gradwire.server")


class Output:
    """Writes the final parameters and the best version. It belongs to the event loop of the conductor, which
    calls it.

    Attributes:
        unsaved: True if the last parameters could not be written to their path.
    """

    def __init__(
        self, path: Path | None, shard: Shard, state: ModelState, recorder: Recorder, *, keep_best: bool
    ) -> None:
        """
        Args:
            path: path of the final parameters; None without --output. The parameters of an unfinished job are
                written to a file beside it, which neither overwrites a finished model nor looks like one.
            keep_best: True to keep the best evaluated version, in a file beside `path` and in the recorder's
                folder."""
        self._path, self._shard, self._state = path, shard, state
        self._bests: list[BestFile | BestCheckpoint] = []
        if keep_best and path is not None:
            self._bests.append(BestFile(path.with_name(f"{path.stem}.best{path.suffix}"), shard, state))
        if keep_best and recorder.keeps:
            self._bests.append(BestCheckpoint(recorder, shard, state))
        self.unsaved = False

    def evaluated(self, epoch: int, version: int) -> None:
        """Called before a member evaluates a version, which is the shard's present one: copy the version as a
        candidate for the best."""
        for each in self._bests:
            each.evaluated(epoch, version)

    def best(self, epoch: int, version: int) -> None:
        """Called when an evaluated version is the best so far: keep its copy."""
        for each in self._bests:
            each.best(epoch, version)

    def judged(self) -> None:
        """Called after an evaluation has been reported, and after `best` if it was the best: drop the
        candidate."""
        for each in self._bests:
            each.judged()

    async def write(self, epoch: int | None) -> str:
        """Write the final parameters, if there is a path for them, and return their SHA-256.

        epoch: the last evaluated epoch of a finished job, whose buffers are written; None for an unfinished
        job, which is written to a file beside the path."""
        finished = epoch is not None
        shard, path = self._shard, self._path
        for each in self._bests:
            await each.close()
        copy = await shard.copy(last=True, undo=not finished)
        digest, version = copy.digest, copy.version
        if path is None:
            return digest
        if not finished and version == 0:
            log.info("no parameters written: there is no version after the initial one")
            return digest
        if not finished:
            path = path.with_name(f"{path.stem}.unfinished-v{version}{path.suffix}")
        entries, found = self._state.entries, copy.parameters.keys() | self._state.frozen.keys()
        try:
            values = {
                **self._state.frozen,
                **await (self._state.newest() if epoch is None else self._state.of(epoch)),
            }
        except Exception as error:
            log.error("saving the parameters without buffers, which are unavailable: %s", error)
            values = dict(self._state.frozen)
            entries = [each for each in entries if found & {each.name, each.tied_to}]

        def save(file: Path) -> None:
            tensors = complete(copy.parameters, entries, values)
            write_model(file, tensors, version=version, digest=digest, finished=finished)

        self.unsaved = not await written(path, version, lambda file: asyncio.to_thread(save, file))
        return digest


async def written(path: Path, version: int, save: Callable[[Path], Awaitable[None]]) -> bool:
    """Save the parameters in a file. If that fails, save them in the folder for temporary files, so that a
    full disk does not lose them.

    Args:
        save: function that writes the parameters to the path that it is given.

    Returns:
        True if the parameters are in the file at `path`.
    """
    elsewhere = Path(tempfile.gettempdir()) / path.name
    for file in (path, elsewhere):
        try:
            await save(file)
        except Exception as error:
            log.error("could not save the parameters as %s: %s", file, error)
            continue
        level = logging.INFO if file == path else logging.ERROR
        log.log(level, "parameters of version %d written to %s", version, file)
        return file == path
    return False
