"""The files of --output: the last parameters, and the best version's beside them."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from .best import BestFile
from .ending import written
from .model_state import ModelState, Values, complete
from .shard.shard import Shard

log = logging.getLogger("gradwire.server")


class Output:
    """Belongs to one event loop.

    Attributes:
        best: of the versions that are evaluated; None where nobody wants that file.
        unsaved: the last parameters are not where they were to be written.
    """

    def __init__(self, path: Path | None, shard: Shard, state: ModelState, *, keep_best: bool) -> None:
        """path: of the final parameters; None where nobody wants them. Those of a job that ends before it is
        finished go to a file beside it, so that no finished model is lost to them, or mistaken for them."""
        self._path, self._shard, self._state = path, shard, state
        self.best: BestFile | None = None
        if keep_best and path is not None:
            best = path.with_name(f"{path.stem}.best{path.suffix}")
            self.best = BestFile(best, shard, state)
        self.unsaved = False

    async def write(self, buffers: Callable[[], Awaitable[Values]], *, finished: bool) -> str:
        """Write the parameters with these buffers, if somebody wants them. Returns their SHA-256."""
        shard, path = self._shard, self._path
        if self.best is not None:
            await self.best.close()
        if not finished:
            await shard.undo()
        digest = await shard.digest()
        if path is None:
            return digest
        if not finished and shard.version == 0:
            log.info("no parameters written: there is no version after the initial one")
            return digest
        if not finished:
            path = path.with_name(f"{path.stem}.unfinished-v{shard.version}{path.suffix}")
        try:
            values = {**self._state.frozen, **await buffers()}
        except Exception as error:
            log.error("the parameters are saved without buffers: %s", error)
            values = dict(self._state.frozen)
        entries = self._state.entries
        self.unsaved = not await written(
            path,
            shard.version,
            lambda file: shard.save(
                file, digest, finished=finished, complete=lambda tensors: complete(tensors, entries, values)
            ),
        )
        return digest
